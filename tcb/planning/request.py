"""What a user asks of the engine, and what the engine answers.

It does not know models, tokenizers, tensors, or how far a request has come.
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from enum import IntEnum
from math import isfinite
from numbers import Integral, Real
from operator import index
from time import perf_counter
from typing import Any


class RequestStatus(IntEnum):
    """Where a request stands, as seen from outside; names and numbers are those of transformers."""

    PENDING = 0
    PREFILLING = 1
    DECODING = 2
    FINISHED = 3
    FAILED = 4


@dataclass
class GenerationOutput:
    """A snapshot of one request; names, order and defaults of the fields are those of transformers.

    `logprobs` holds one value for each generated token where they were asked for, else it is empty.
    `created_time`, `lifespan` (start, end) and `timestamps` are `time.perf_counter` seconds; -1 in
    `lifespan` is an instant that has not come.
    """

    request_id: str
    prompt_ids: list[int] = field(default_factory=list)
    generated_tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    error: str | None = None
    status: RequestStatus = RequestStatus.PENDING
    created_time: float = field(default_factory=perf_counter)
    lifespan: tuple[float, float] = (-1, -1)
    timestamps: list[float] | None = None

    def is_finished(self) -> bool:
        """Whether the request has come to an end, good or bad."""
        return self.status in (RequestStatus.FINISHED, RequestStatus.FAILED)


@dataclass
class WorkloadHints:
    """What a user foretells of the requests to come; 0 is unknown. Fields as in transformers.

    `max_prompt_length` and `max_generated_length` count the tokens of one request.
    """

    max_prompt_length: int = 0
    max_generated_length: int = 0
    num_requests: int = 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. `top_k` 0, `top_p` 1 and `min_p` 0 are off.

    Without `do_sample` the highest logit wins and nothing else here has a say, so nothing else is
    checked. Raises ValueError.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self):
        if not self.do_sample:
            return
        warm = _is_number(self.temperature) and self.temperature > 0
        _require(warm, self, "temperature", "finite numbers > 0")
        _require(_is_integer(self.top_k) and self.top_k >= 0, self, "top_k", "integers >= 0")
        _require(_is_number(self.top_p) and 0 <= self.top_p <= 1, self, "top_p", "[0, 1]")
        _require(_is_number(self.min_p) and 0 <= self.min_p <= 1, self, "min_p", "[0, 1]")
        fits = _is_integer(self.seed) and -(2**63) <= self.seed < 2**63
        _require(fits, self, "seed", "integers in [-2**63, 2**63)")


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asked for one prompt.

    prompt            token ids, as `check_prompt` returns them
    max_new_tokens    most tokens to generate, at least 1
    eos               token ids of which each one ends the generation
    parent            id of the request that this one is forked from
    streaming         deliver every token, not only the end
    created_time      `time.perf_counter` seconds
    processors        logits processors of this request that read its history; opaque here

    Raises ValueError.
    """

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    sampling: SamplingParams = SamplingParams()
    parent: str | None = None
    streaming: bool = False
    record_timestamps: bool = False
    created_time: float = 0.0
    processors: Any = None

    def __post_init__(self):
        _require(isinstance(self.id, str) and self.id != "", self, "id", "non-empty strings")
        fits = _is_integer(self.max_new_tokens) and self.max_new_tokens >= 1
        _require(fits, self, "max_new_tokens", "integers >= 1")
        if not self.prompt:
            raise ValueError("prompt is (); accepted: at least one token id")


def check_prompt(tokens: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """The token ids of a prompt as plain integers, each in [0, vocab_size).

    Takes lists, tuples, other ordered iterables, and one-dimensional arrays and tensors. An element
    is an integer or something that stands for one (`__index__`); booleans are not integers.
    Raises ValueError that says what is wrong, and at which place of the prompt.
    """
    if tokens is None or isinstance(tokens, str | bytes | bytearray | Mapping | Set):
        kind = type(tokens).__name__
        raise ValueError(f"prompt is a {kind}; accepted: a one-dimensional sequence of token ids")
    plain = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    if not isinstance(plain, Iterable):
        raise ValueError(f"prompt is {plain!r}; accepted: a one-dimensional sequence of token ids")
    prompt = tuple(plain)
    if not prompt:
        raise ValueError("prompt is empty; accepted: at least one token id")
    # the set of types is a third of the price of a look at every element
    if set(map(type, prompt)) != {int}:
        prompt = tuple(
            _plain_integer(f"prompt[{place}]", token) for place, token in enumerate(prompt)
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        place = next(i for i, token in enumerate(prompt) if not 0 <= token < vocab_size)
        raise ValueError(
            f"prompt[{place}] is {prompt[place]}; accepted: token ids in [0, {vocab_size})"
        )
    return prompt


def end_tokens(value: Any) -> frozenset[int]:
    """The ids that an `eos_token_id` names: an integer, several of them, an array or tensor, None.

    Negative ids match no token and are left out. Raises ValueError for anything else.
    """
    plain = value.tolist() if hasattr(value, "tolist") else value
    plain = [] if plain is None else plain
    several = isinstance(plain, Iterable) and not isinstance(plain, str | bytes | Mapping)
    accepted = "an integer, integers, None"
    tokens = plain if several else [plain]
    ids = [_plain_integer("eos_token_id", token, accepted) for token in tokens]
    return frozenset(token for token in ids if token >= 0)


def _plain_integer(name, token, accepted="integers"):
    """The integer that a token id stands for; `item` opens scalars of arrays."""
    try:
        plain = token.item() if hasattr(token, "item") else token
        if isinstance(plain, bool):
            raise TypeError
        return index(plain)
    except (TypeError, ValueError, RuntimeError):
        shown = f"{token!r} of type {type(token).__name__}"
        raise ValueError(f"{name} is {shown:.200}; accepted: {accepted}") from None


def _is_integer(value):
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value):
    return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)


def _require(holds, owner, name, accepted):
    if not holds:
        raise ValueError(f"{name} is {getattr(owner, name)!r}; accepted: {accepted}")
