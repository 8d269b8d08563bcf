"""Logits processors that read a request's history: built as `generate` builds them, and applied.

Temperature, top-k, top-p and min-p alone need none: the sampling kernel has them.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import logits_process

from tcb.options.own_code import OwnCode
from tcb.planning.plan import BatchPlan
from tcb.planning.state import State

# a sampled row's own processors and all its tokens so far, by the row's place among the samples
Histories = Mapping[int, tuple[LogitsProcessorList, Sequence[int]]]

_NOTHING_OF_ITS_OWN = OwnCode()
# what `tcb.kernels.sample` does by itself
_NATIVE = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
)


def build_processors(
    model: Any,
    config: GenerationConfig,
    prompt: Sequence[int],
    max_new_tokens: int,
    eos: Iterable[int],
    device: torch.device | str | None = None,
    own: OwnCode = _NOTHING_OF_ITS_OWN,
) -> LogitsProcessorList:
    """What `GenerationMixin.generate` builds for this prompt alone: its steps 3 (special tokens), 6
    (lengths) and 8.

    config   every default is filled in; unchanged
    own      what the caller brings is copied
    device   where the scores will be; the model's if None
    Raises ValueError that names the options a processor refuses.
    """
    config = copy.copy(config)
    config.eos_token_id = sorted(eos) or None
    config.max_length = len(prompt) + max_new_tokens
    device = model.device if device is None else device
    try:
        if config.min_new_tokens is not None:
            config.min_length = len(prompt) + config.min_new_tokens
        model._prepare_special_tokens(config, True, device=device, batch_size=1)
        return model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=len(prompt),
            encoder_input_ids=torch.tensor([prompt], dtype=torch.long, device=device),
            logits_processor=LogitsProcessorList(own.copy_of(own.logits_processor)),
            prefix_allowed_tokens_fn=own.prefix_allowed_tokens_fn,
            device=device,
            model_kwargs={},
        )
    except (ValueError, TypeError, AttributeError, RuntimeError, IndexError) as error:
        raise ValueError(f"generation options {_active(config)} are refused: {error}") from error


def need_history(processors: LogitsProcessorList) -> bool:
    """Whether one of these does what the sampling kernel does not."""
    return any(type(processor) not in _NATIVE for processor in processors)


def histories_of(state: State, plan: BatchPlan) -> Histories:
    """Processors and tokens of a plan's samples whose requests bring processors of their own."""
    sequences = map(state.find, plan.sample_seq_ids)
    return {
        place: (sequence.request.processors, sequence.known())
        for place, sequence in enumerate(sequences)
        if sequence is not None and sequence.request.processors is not None
    }


def apply_history(
    processors: LogitsProcessorList, input_ids: Sequence[int], scores: torch.Tensor
) -> torch.Tensor:
    """The scores [vocab] fp32 of one request after its processors; `scores` [vocab] (any floating
    dtype) is unchanged.

    input_ids   prompt and generated tokens so far
    Raises what a processor raises: it concerns this request alone.
    """
    history: Any = torch.tensor([input_ids], dtype=torch.long, device=scores.device)
    processed = processors(history, scores[None].to(torch.float32, copy=True))
    if processed.shape != (1, *scores.shape):
        raise ValueError(
            f"the logits processors gave scores of shape {list(processed.shape)}; "
            f"accepted: {[1, *scores.shape]}"
        )
    return processed[0]


def apply_histories(
    histories: Histories, logits: torch.Tensor
) -> tuple[torch.Tensor, dict[int, str]]:
    """The logits [samples, vocab] after the rows' own processors, in fp32 if there are any; fp32
    ones are written in place.

    What a row's processor raises fails that row alone: its logits become NaN, and the errors say
    why, by the row's place.
    """
    errors: dict[int, str] = {}
    if not histories:
        return logits, errors
    logits = logits.float()
    for place, (processors, tokens) in histories.items():
        try:
            logits[place] = apply_history(processors, tokens, logits[place])
        except Exception as error:
            logits[place] = float("nan")
            errors[place] = f"logits processor: {type(error).__name__}: {error}"
    return logits, errors


def _active(config: GenerationConfig) -> dict[str, Any]:
    """The options of a config that are not transformers' defaults."""
    defaults = GenerationConfig().to_dict() | GenerationConfig._get_default_generation_params()
    return {
        name: value
        for name, value in config.to_dict().items()
        if not (name.startswith("_") or name.endswith("_token_id") or name == "max_length")
        and value not in (None, defaults.get(name))
    }
