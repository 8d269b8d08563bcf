"""What a user asks of the engine, and what the engine answers."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from operator import index
from time import perf_counter
from typing import Any

from tcb.planning.rules import BOOLEANS, Rule, integers, numbers


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


def _option(default: Any, rule: Rule) -> Any:
    return field(default=default, metadata={"rule": rule})


_SHARES = numbers("numbers in [0, 1]", lambda value: 0 <= value <= 1)
_SEEDS = integers(-(2**63), 2**63 - 1, "integers in [-2**63, 2**63)")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen: a field is a generation option, an option of one request, a
    column on the device and a keyword of `tcb.kernels.sample`.

    The default of a field means off, and its type is the type of the column. Without `do_sample`
    the highest logit wins and nothing else here has a say, so nothing else is checked. Raises
    ValueError.
    """

    do_sample: bool = _option(False, replace(BOOLEANS, accepted="True, False"))
    temperature: float = _option(1.0, numbers("finite numbers > 0", lambda value: value > 0))
    top_k: int = _option(0, integers(0, accepted="integers >= 0 (0 is off)"))
    top_p: float = _option(1.0, _SHARES)
    min_p: float = _option(0.0, _SHARES)
    seed: int = _option(0, _SEEDS)

    def __post_init__(self) -> None:
        for each in fields(self) if self.do_sample else ():
            _require(self, each.name, each.metadata["rule"])


_IDS = Rule("non-empty strings", lambda value: isinstance(value, str), lambda value: value != "")
_COUNTS = integers(1)


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

    def __post_init__(self) -> None:
        _require(self, "id", _IDS)
        _require(self, "max_new_tokens", _COUNTS)
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


def _plain_integer(name: str, token: Any, accepted: str = "integers") -> int:
    """The integer that a token id stands for; `item` opens scalars of arrays."""
    try:
        plain = token.item() if hasattr(token, "item") else token
        if isinstance(plain, bool):
            raise TypeError
        return index(plain)
    except (TypeError, ValueError, RuntimeError):
        shown = f"{token!r} of type {type(token).__name__}"
        raise ValueError(f"{name} is {shown:.200}; accepted: {accepted}") from None


def _require(owner: Any, name: str, rule: Rule) -> None:
    value = getattr(owner, name)
    if not rule.holds(value):
        raise ValueError(f"{name} is {value!r}; accepted: {rule.accepted}")
