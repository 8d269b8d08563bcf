"""Read what a call is given as prompts: rows of token ids, a tokenizer's output, or texts."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tcb.planning.rules import is_integer

_ACCEPTED = (
    "prompts, each a list of token ids; what a tokenizer returns, with its 'input_ids'; texts with "
    "tokenizer="
)


def list_of_prompts(inputs: Any, tokenizer: Callable[..., Any] | None = None) -> list[Any]:
    """The prompts one by one, whatever is in them.

    inputs      prompts, or the mapping that a tokenizer returns: `input_ids` and, if they are
                padded, their `attention_mask`; or texts
    tokenizer   turns texts into token ids, by calling it

    Of a row whose mask is given, the tokens that it marks are the prompt; what it leaves out may
    lie on either side. Raises TypeError for what holds no prompts: a single one as well, which
    would be taken for prompts of one token each; and ValueError for a mask of another shape, or
    with a hole.
    """
    if isinstance(inputs, Mapping) and "input_ids" in inputs:
        prompts = _rows("input_ids", inputs["input_ids"])
        mask = inputs.get("attention_mask")
        return prompts if mask is None else _without_padding(prompts, mask)
    if not isinstance(inputs, str):
        prompts = _rows("inputs", inputs)
        if not prompts or not all(isinstance(prompt, str) for prompt in prompts):
            return prompts
    if tokenizer is None or isinstance(inputs, str):
        shown = "a str" if isinstance(inputs, str) else f"{len(prompts)} texts without a tokenizer"
        raise TypeError(f"inputs is {shown}; accepted: {_ACCEPTED}")
    return list(tokenizer(prompts)["input_ids"])


def _rows(name: str, rows: Any) -> list[Any]:
    """The rows of what must be a collection of prompts."""
    is_row = isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable)
    if is_row or getattr(rows, "ndim", 2) == 0:
        raise TypeError(f"{name} is a {type(rows).__name__}; accepted: {_ACCEPTED}")
    prompts = list(rows)
    is_flat = getattr(rows, "ndim", None) == 1 or all(map(is_integer, prompts))
    if prompts and is_flat:
        raise TypeError(
            f"{name} is one prompt of {len(prompts)} token ids; accepted: a list of prompts, "
            "[prompt] for one"
        )
    return prompts


def _without_padding(prompts: list[Any], mask: Any) -> list[Any]:
    """The rows without what their mask leaves out at either end."""
    masks = _rows("attention_mask", mask)
    if len(masks) != len(prompts):
        raise ValueError(f"attention_mask has {len(masks)} rows; accepted: {len(prompts)}")
    return [
        _marked(i, row, marks) for i, (row, marks) in enumerate(zip(prompts, masks, strict=True))
    ]


def _marked(place: int, row: Any, marks: Any) -> Any:
    """The part of a row that its mask marks, which must be one stretch."""
    kept = [bool(mark) for mark in marks]
    if len(kept) != len(row):
        raise ValueError(
            f"attention_mask[{place}] has {len(kept)} entries; accepted: {len(row)}, one a token"
        )
    if not any(kept):
        return row[:0]
    start, count = kept.index(True), sum(kept)
    if not all(kept[start : start + count]):
        raise ValueError(
            f"attention_mask[{place}] has a hole; accepted: padding before and after a prompt"
        )
    return row[start : start + count]
