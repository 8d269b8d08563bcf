"""What a user asks of the engine."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

from tcb.planning.rules import BOOLEANS, Rule, integers, numbers


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

    prompt            token ids, as `tokens.check_prompt` returns them
    max_new_tokens    most tokens to generate, at least 1
    eos               token ids of which each one ends the generation
    parent            id of the request that this one is forked from
    streaming         deliver every token, not only the end
    created_time      `time.perf_counter` seconds
    processors        logits processors of this request that read its history; opaque here
    stop              asked after each token, `stop(prompt, generated)`: True ends the generation, a
                      string ends it as failed for this reason

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
    stop: Any = None

    def __post_init__(self) -> None:
        _require(self, "id", _IDS)
        _require(self, "max_new_tokens", _COUNTS)
        if not self.prompt:
            raise ValueError("prompt is (); accepted: at least one token id")


def _require(owner: Any, name: str, rule: Rule) -> None:
    value = getattr(owner, name)
    if not rule.holds(value):
        raise ValueError(f"{name} is {value!r}; accepted: {rule.accepted}")
