"""What is compared: this package, transformers' continuous batching and padded `generate`.

Each takes a model, prompts and a number of new tokens, and returns the new tokens of each prompt.
It knows how each is called and which of its settings are worth a try, and no workload.
"""

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel

from bench.lib.results import device_name
from bench.models import cache_folder

# an end token that no vocabulary has: None would mean the model's own
NO_TOKEN = 2**31 - 1

Prompts = Sequence[list[int]]
Settings = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class System:
    """`run(model, prompts, new_tokens, settings)` returns the new tokens of each prompt, in order.

    `candidates(model, prompts, new_tokens)` names the settings of which the best is to be compared.
    """

    run: Callable[[PreTrainedModel, Prompts, int, Settings], list[list[int]]]
    candidates: Callable[[PreTrainedModel, Prompts, int], dict[str, Settings]]


def run_tcb(
    model: PreTrainedModel,
    prompts: Prompts,
    new_tokens: int,
    settings: Settings,
    progress_bar: bool = False,
) -> list[list[int]]:
    """This package, by the call that its users make."""
    import tcb

    outputs = tcb.generate_batch(
        model,
        list(prompts),
        generation_config=greedy(new_tokens),
        continuous_batching_config=tcb.ContinuousBatchingConfig(**settings),
        progress_bar=progress_bar,
    )
    return _tokens(outputs)


def run_transformers(
    model: PreTrainedModel, prompts: Prompts, new_tokens: int, settings: Settings
) -> list[list[int]]:
    """The continuous batching of transformers, by the call that its users make."""
    settings = dict(settings)
    known = {field.name for field in dataclasses.fields(transformers.ContinuousBatchingConfig)}
    if "page_size" in settings and "page_size" not in known:
        # its name before transformers 5.24
        settings["block_size"] = settings.pop("page_size")
    with _errors_only():
        outputs = model.generate_batch(
            list(prompts),
            generation_config=greedy(new_tokens),
            continuous_batching_config=transformers.ContinuousBatchingConfig(**settings),
        )
    return _tokens(outputs)


def run_padded(
    model: PreTrainedModel, prompts: Prompts, new_tokens: int, settings: Settings
) -> list[list[int]]:
    """`model.generate` on all prompts at once, padded on the left to the longest."""
    width = max(map(len, prompts))
    input_ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for i, prompt in enumerate(prompts):
        input_ids[i, width - len(prompt) :] = torch.tensor(prompt)
        attention_mask[i, width - len(prompt) :] = 1
    output = model.generate(
        input_ids.to(model.device),
        attention_mask=attention_mask.to(model.device),
        generation_config=greedy(new_tokens),
        **settings,
    )
    return output[:, width:].tolist()


def _transformers_candidates(
    model: PreTrainedModel, prompts: Prompts, new_tokens: int
) -> dict[str, Settings]:
    """Its defaults; and pools, batches and pages cut to the workload, the better ones of a search.

    On a CPU the default of 60 % of the memory is written to at once, so there a tenth is used.
    Its attention runs over all tokens of a batch together unless a flash kernel is there, so that
    small batches help it; pools just large enough spare it masks.
    """

    def cut(page_size: int, max_batch_tokens: int, **more: Any) -> Settings:
        blocks = sum(-(-(len(prompt) + new_tokens) // page_size) + 1 for prompt in prompts)
        return {
            "page_size": page_size,
            "num_blocks": blocks,
            "max_batch_tokens": max_batch_tokens,
            **more,
        }

    eager = {"scheduler_type": "prefill_first", "safety_margin": 0.0}
    return {
        "defaults": {"max_memory_percent": 0.1} if model.device.type == "cpu" else {},
        "cut, 512 a batch": cut(256, 512),
        "cut, 512 a batch, prefill first": cut(256, 512, **eager),
        "cut, 2048 a batch, page 32": cut(32, 2048),
    }


@contextmanager
def _errors_only() -> Iterator[None]:
    """transformers prints a line a call where it lacks a flash kernel; here that is known."""
    logger = logging.getLogger("ContinuousBatchingLogger")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _as_is(model: PreTrainedModel, prompts: Prompts, new_tokens: int) -> dict[str, Settings]:
    return {"defaults": {}}


def _tokens(outputs: dict[str, Any]) -> list[list[int]]:
    failed = [output.error for output in outputs.values() if output.error]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed, the first with: {failed[0]}")
    return [list(output.generated_tokens) for output in outputs.values()]


SYSTEMS = {
    "tcb": System(run_tcb, _as_is),
    "transformers-cb": System(run_transformers, _transformers_candidates),
    "generate-padded": System(run_padded, _as_is),
}


def greedy(new_tokens: int, pad_token: int = 0) -> GenerationConfig:
    """Return the options under which each request gets exactly `new_tokens` tokens."""
    return GenerationConfig(
        do_sample=False, max_new_tokens=new_tokens, eos_token_id=NO_TOKEN, pad_token_id=pad_token
    )


def references(
    model: PreTrainedModel,
    name: str,
    prompts: Sequence[list[int]],
    new_tokens: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """Return the `new_tokens` greedy tokens of each prompt alone.

    `name` must identify the weights. Writes files that are not there yet to the cache folder and
    calls `progress(done, total)` after each prompt.
    """
    found = []
    for prompt in prompts:
        found.append(_reference(model, name, prompt, new_tokens))
        if progress:
            progress(len(found), len(prompts))
    return found


def _reference(model: PreTrainedModel, name: str, prompt: list[int], new_tokens: int) -> list[int]:
    path = cache_folder() / "references" / f"{_key(model, name, prompt, new_tokens)}.json"
    if path.is_file():
        return json.loads(path.read_text())
    input_ids = torch.tensor([prompt], device=model.device)
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        generation_config=greedy(new_tokens),
    )
    tokens = output[0, len(prompt) :].tolist()
    assert len(tokens) == new_tokens, f"generate gave {len(tokens)} tokens, asked for {new_tokens}"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(tokens))
    partial.replace(path)
    return tokens


def _key(model: PreTrainedModel, name: str, prompt: list[int], new_tokens: int) -> str:
    facts = [
        name,
        str(model.dtype),
        device_name(model.device),
        torch.__version__,
        transformers.__version__,
        new_tokens,
        prompt,
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
