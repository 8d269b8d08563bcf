"""What callers bring that runs between two tokens of a request: processors, criteria to stop, stop
strings, a clock.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteriaList, StopStringCriteria
from transformers.generation import MaxTimeCriteria


@dataclass(frozen=True, slots=True)
class OwnCode:
    """The arguments of `generate` that are no fields of a generation config.

    logits_processor, stopping_criteria   callables, as `generate` takes them; a request calls a
                                          copy of its own, so they may keep state
    prefix_allowed_tokens_fn              as `generate` takes it; called with batch 0
    tokenizer                             reads stop strings, and prompts that are texts
    """

    logits_processor: Sequence[Callable] | None = None
    stopping_criteria: Sequence[Callable] | None = None
    prefix_allowed_tokens_fn: Callable | None = None
    tokenizer: Any = None

    def replace(self, given: Mapping[str, Any]) -> "OwnCode":
        """These with others given by name; TypeError or ValueError names what cannot be called."""
        for name in ("logits_processor", "stopping_criteria"):
            value = given.get(name)
            if value is not None and not isinstance(value, list | tuple):
                kind = type(value).__name__
                raise TypeError(f"{name} is a {kind}; accepted: a list of callables, None")
            for item in value or ():
                _require_callable(name, item)
        if given.get("prefix_allowed_tokens_fn") is not None:
            _require_callable("prefix_allowed_tokens_fn", given["prefix_allowed_tokens_fn"])
        return dataclasses.replace(self, **given)

    def copy_of(self, items: Sequence[Callable] | None) -> list[Callable]:
        """A request's own copy of some of these; models and the tokenizer in them are shared.

        Raises ValueError naming what cannot be copied.
        """
        shared = {id(item): item for item in _modules_in(items or ())}
        shared[id(self.tokenizer)] = self.tokenizer
        try:
            return copy.deepcopy(list(items or ()), shared)
        except Exception as error:
            names = [type(item).__name__ for item in items or ()]
            raise ValueError(f"{names} cannot be copied for each request: {error}") from error


OWN_CODE = tuple(each.name for each in dataclasses.fields(OwnCode))


class Stop:
    """Whether a generation ends after its latest token, by what `generate` would ask: stop strings,
    a clock that runs from now on, and the caller's own criteria.
    """

    def __init__(self, config: GenerationConfig, own: OwnCode, device: torch.device) -> None:
        self._criteria: Any = StoppingCriteriaList(own.copy_of(own.stopping_criteria))
        self._device = device
        # as in `generate`, a criterion of the caller's goes before its like
        kinds = {type(criterion) for criterion in self._criteria}
        has_own = StopStringCriteria in kinds
        self._strings = None if has_own else stop_strings(config, own.tokenizer)
        if config.max_time is not None and MaxTimeCriteria not in kinds:
            self._criteria.append(MaxTimeCriteria(config.max_time))

    def __call__(self, prompt: Sequence[int], generated: Sequence[int]) -> bool | str:
        """True after the last token; a reason where a criterion fails, which ends the request."""
        try:
            return self._is_said(prompt, generated) or self._is_decided(prompt, generated)
        except Exception as error:
            return f"stopping criterion: {type(error).__name__}: {error}"

    def _is_said(self, prompt: Sequence[int], generated: Sequence[int]) -> bool:
        if self._strings is None or generated[-1] not in self._strings.last:
            return False
        length = self._strings.criterion.maximum_token_len
        tokens = [*prompt[max(0, len(prompt) + len(generated) - length) :], *generated[-length:]]
        ids: Any = torch.tensor([tokens], device="cpu")
        return bool(self._strings.criterion(ids, None))

    def _is_decided(self, prompt: Sequence[int], generated: Sequence[int]) -> bool:
        if not self._criteria:
            return False
        ids: Any = torch.tensor([[*prompt, *generated]], device=self._device)
        return bool(torch.as_tensor(self._criteria(ids, None)).all())


@dataclass(frozen=True, slots=True)
class _Strings:
    """transformers' criterion for stop strings, and the tokens that can be the last of one."""

    criterion: StopStringCriteria
    last: frozenset[int]


def may_stop(config: GenerationConfig, own: OwnCode) -> bool:
    """Whether anything but a length or an end token may end a generation."""
    return bool(own.stopping_criteria or config.max_time is not None or config.stop_strings)


def stop_strings(config: GenerationConfig, tokenizer: Any) -> _Strings | None:
    """What finds a config's stop strings; None if it has none.

    Raises ValueError without a tokenizer, and for what are no stop strings of it.
    """
    strings = config.stop_strings
    if not strings:
        return None
    if tokenizer is None:
        raise ValueError(f"stop_strings is {strings!r}; accepted: None without `tokenizer=`")
    strings = (strings,) if isinstance(strings, str) else tuple(strings)
    if not all(isinstance(string, str) and string for string in strings):
        raise ValueError(f"stop_strings is {strings!r}; accepted: non-empty strings, None")
    return _find_strings(tokenizer, strings)


@lru_cache(maxsize=8)
def _find_strings(tokenizer: Any, strings: tuple[str, ...]) -> _Strings:
    """Reads the vocabulary, which takes tenths of a second, once for equal strings."""
    try:
        criterion = StopStringCriteria(tokenizer, list(strings))
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ValueError(f"stop_strings is {strings!r}, which is refused: {error}") from error
    # a token's row: where in the strings it fits, how much of their ends it holds, its length
    ends = criterion.embedding_vec[
        :, criterion.max_valid_positions * criterion.num_stop_strings : -1
    ]
    return _Strings(criterion, frozenset((ends > 0).any(1).nonzero()[:, 0].tolist()))


def _require_callable(name: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(f"{name} holds a {type(value).__name__}; accepted: callables")


def _modules_in(items: Sequence[Any]) -> list[Any]:
    """Models, and tokenizers of transformers, that callables hold in attributes."""
    held = [value for item in items for value in getattr(item, "__dict__", {}).values()]
    return [value for value in held if isinstance(value, torch.nn.Module) or _is_tokenizer(value)]


def _is_tokenizer(value: Any) -> bool:
    return callable(value) and hasattr(value, "convert_ids_to_tokens")
