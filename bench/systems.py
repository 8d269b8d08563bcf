"""What is compared: this package, transformers' continuous batching and padded `generate`.

Each takes a model, prompts and a number of new tokens, and returns the new tokens of each prompt.
It knows how each is called and which of its settings are worth a try, and no workload.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from bench.references import greedy

Prompts = Sequence[list[int]]
Settings = dict[str, Any]

# transformers prints a line a call where it lacks a flash kernel; here that is known
logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)


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
