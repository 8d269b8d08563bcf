"""Answer `generate(cache_implementation="paged")` by a batch, as transformers shapes it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tcb.options.generation import ASKS_FOR_RECORD
from tcb.planning.output import GenerationOutput

_UNSUPPORTED = (
    "assistant_model",
    "streamer",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
)


def generate_paged(
    generate_batch: Callable[..., dict],
    model: nn.Module,
    inputs: Tensor | None = None,
    generation_config: Any = None,
    **kwargs: Any,
) -> Tensor:
    """Prompts and what follows them, one row for each output, padded on the right.

    inputs    int64 [length] or [prompts, length]; `input_ids` is another name of it. Padding that
              `attention_mask` marks, or that `generate` would take for padding, is no part of a
              prompt
    returns   int64 [1, prompts * return sequences, longest], as transformers shapes it

    Raises NotImplementedError for arguments that have no meaning here, TypeError for unknown ones,
    and RuntimeError if a request failed.
    """
    for name in _UNSUPPORTED:
        if kwargs.pop(name, None) is not None:
            raise NotImplementedError(f"{name} is not supported with cache_implementation='paged'")
    for name in ("cache_implementation", "synced_gpus", "use_model_defaults", "custom_generate"):
        kwargs.pop(name, None)
    for name in ASKS_FOR_RECORD:
        if asked := _option(name, model, generation_config, kwargs):
            raise ValueError(f"{name} is {asked!r}; accepted: False (tokens are returned)")
    rows = kwargs.pop("input_ids", None) if inputs is None else inputs
    mask = kwargs.pop("attention_mask", None)
    if rows is None or rows.dim() not in (1, 2):
        shape = None if rows is None else list(rows.shape)
        raise ValueError(f"inputs has shape {shape}; accepted: [length] and [prompts, length]")
    rows = rows if rows.dim() == 2 else rows[None]
    pad = _option("pad_token_id", model, generation_config, kwargs)
    eos = _option("eos_token_id", model, generation_config, kwargs)
    kept = _mask(rows, mask, pad, eos)
    prompts = [row[keep] for row, keep in zip(rows, kept, strict=True)]
    outputs = list(
        generate_batch(model, prompts, generation_config=generation_config, **kwargs).values()
    )
    if failed := [output for output in outputs if output.error is not None]:
        first = failed[0]
        raise RuntimeError(f"{len(failed)} requests failed, {first.request_id}: {first.error}")
    per_prompt = len(outputs) // len(rows)
    return _stack(rows.repeat_interleave(per_prompt, 0), outputs, _filler(pad, eos))


def _option(name: str, model: nn.Module, generation_config: Any, options: Mapping[str, Any]) -> Any:
    """An option as `generate` finds it: in the call, in its config, in the model's own."""
    own = getattr(model, "generation_config", None)
    found = [options.get(name), getattr(generation_config, name, None), getattr(own, name, None)]
    return next((option for option in found if option is not None), None)


def _mask(rows: Tensor, mask: Tensor | None, pad: Any, eos: Any) -> Tensor:
    """Which tokens belong to the prompts, bool [prompts, length], read as `generate` reads it."""
    if mask is not None:
        return (mask if mask.dim() == 2 else mask[None]).bool()
    ends = eos if isinstance(eos, list | tuple) else [eos]
    if pad is None or pad in ends or not (rows == pad).any():
        return torch.ones_like(rows, dtype=torch.bool)
    return rows != pad


def _filler(pad: int | None, eos: Any) -> int:
    """The token behind a row that ended earlier than others."""
    if pad is not None:
        return pad
    first = eos[0] if isinstance(eos, list | tuple) else eos
    return 0 if first is None or first < 0 else first


def _stack(rows: Tensor, outputs: Sequence[GenerationOutput], filler: int) -> Tensor:
    """int64 [1, outputs, longest]: each row as it was handed in, and its new tokens."""
    longest = max(len(output.generated_tokens) for output in outputs)
    new = rows.new_full((len(outputs), longest), filler)
    for place, output in enumerate(outputs):
        tokens = output.generated_tokens
        new[place, : len(tokens)] = torch.tensor(tokens, dtype=new.dtype)
    return torch.cat([rows, new], dim=1)[None]
