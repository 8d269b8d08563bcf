"""Compile launches ahead of time, as a launcher would start them, and count what the code holds.

Run as a program, with architectures as arguments and without TRITON_INTERPRET: prints a JSON object
a row. A stand-in for the driver names the architecture, tensors are on the meta device, and the
launches are those of the launchers' own plans, so constants and alignments are those of real calls.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tcb.kernels.attention_contract import softmax_factors
from tcb.kernels.tuning import DeviceFacts

DEVICE_CLASS = {"sm_80": "sm_80", "sm_90": "sm_90", "sm_100": "sm_100", "gfx942": "gfx9"}
PROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "gfx942": 304}
EVERYTHING = {"window": 1024, "softcap": 30.0, "sinks": True}
# kind and fields of a launch; each row of the tuning table at the largest head size it serves, and
# odd head sizes, small pages and every option at least once
ROWS = [
    *(("wide", {"dim": dim}) for dim in (64, 128, 256)),
    ("wide", {"dim": 128, "page_size": 16, **EVERYTHING}),
    ("wide", {"dim": 256, **EVERYTHING}),
    ("wide", {"dim": 80, "heads": 14, "kv_heads": 2}),
    ("wide", {"dim": 192, "value_dim": 128, "kv_heads": 32}),
    *(("narrow", {"dim": dim}) for dim in (64, 128, 256)),
    ("narrow", {"dim": 128, "page_size": 16, **EVERYTHING}),
    *(("decode", {"dim": dim}) for dim in (64, 128, 256)),
    ("decode", {"dim": 128, "page_size": 16, **EVERYTHING}),
    ("decode", {"dim": 128, "heads": 64, "kv_heads": 1}),
    ("decode", {"dim": 256, "heads": 32, "kv_heads": 1}),
    ("decode", {"dim": 96, "heads": 20, "kv_heads": 4, "page_size": 12}),
    ("merge", {"dim": 128, **EVERYTHING}),
    ("wide", {"dim": 128, "dtype": "float32"}),
    ("wide", {"dim": 256, "dtype": "float32"}),
    ("decode", {"dim": 128, "dtype": "float32"}),
]


class Driver:
    """What Triton asks of a driver in order to compile; nothing can be launched with it."""

    def __init__(self, arch: str):
        cuda = arch.startswith("sm_")
        name = int(arch.removeprefix("sm_")) if cuda else arch
        self.target = GPUTarget("cuda" if cuda else "hip", name, 32 if cuda else 64)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return str(self.target.arch)

    def get_current_stream(self, device=None):
        return 0


def plan(arch, kind, *, dim, value_dim=0, heads=32, kv_heads=8, page_size=64, dtype="bfloat16",
         window=None, softcap=None, sinks=False):  # fmt: skip
    """The launch of this kind for 64 sequences, tensors on the meta device."""
    # the package holds functions of these names: ask for the modules
    from tcb.kernels.paged_attention import plan_launches as plan_attention
    from tcb.kernels.paged_decode import plan_launches as plan_decode

    element = getattr(torch, dtype)

    def tensor(*shape, dtype=element):
        return torch.empty(shape, dtype=dtype, device="meta")

    sequences, tokens, blocks, columns = 64, 4096, 512, 128
    value_dim = value_dim or dim
    caches = [tensor(blocks, page_size, kv_heads, width) for width in (dim, value_dim)]
    table = tensor(sequences, columns, dtype=torch.int32)
    lengths = tensor(sequences, dtype=torch.int32)
    device = DeviceFacts(DEVICE_CLASS[arch], PROCESSORS[arch])
    sink = tensor(heads) if sinks else None
    has_softcap = softcap is not None
    factors = softmax_factors(None, softcap, dim)
    if kind in ("decode", "merge"):
        query, out = tensor(sequences, heads, dim), tensor(sequences, heads, value_dim)
        launches = plan_decode(
            device, query, *caches, table, lengths, sink, out, window, has_softcap, None, factors
        )
    else:
        query, out = tensor(tokens, heads, dim), tensor(tokens, heads, value_dim)
        new = [tensor(tokens, kv_heads, width) for width in (dim, value_dim)]
        start = tensor(sequences + 1, dtype=torch.int32)
        tensors = query, *new, *caches, table, start, lengths, sink, out
        launches = plan_attention(device, *tensors, window, has_softcap, factors)
    return list(launches)[kind in ("wide", "merge")]


def count(kernel) -> dict[str, int]:
    """Registers, memory and instructions of a compiled kernel."""
    threads = kernel.metadata.num_warps * kernel.metadata.warp_size
    found = {"threads": threads, "shared": kernel.metadata.shared}
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        found["registers"] = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])
        found["spills"] = int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1])
        found["MFMA"] = len(re.findall(r"v_mfma", text))
        return found
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = run(tools / "cuobjdump", "-res-usage", file.name)
        code = run(tools / "nvdisasm", "-c", file.name)
    found["registers"] = int(re.search(r"REG:(\d+)", usage)[1])
    found["spills"] = len(re.findall(r"\b(?:LDL|STL)\b", code))
    for name in ("HGMMA", "HMMA", "UTCHMMA", "LDGSTS"):
        found[name] = len(re.findall(rf"\b{name}\b", code))
    found["LDGSTS.128"] = len(re.findall(r"\bLDGSTS\S*\.128\b", code))
    return found


def run(*command) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    return done.stdout + done.stderr


def main(architectures: list[str]) -> None:
    for arch in architectures:
        driver.set_active(Driver(arch))
        for kind, fields in ROWS:
            launch = plan(arch, kind, **fields)
            grid = (launch.programs,)
            kernel = launch.kernel.warmup(*launch.arguments, grid=grid, **launch.constants)
            row = {"arch": arch, "kind": kind, "fields": fields, **count(kernel)}
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
