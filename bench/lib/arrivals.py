"""Who asks for how much and when: from a distribution, or from a trace.

A trace has one JSON object a line: `time` (seconds, ascending), `prompt` and `new` (tokens), and,
where prompts have a beginning in common, `prefix` (its name) and `shared` (its tokens).
"""

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Asked:
    """One request to come: seconds from the start, tokens, and the beginning that it shares."""

    time: float
    prompt: int
    new: int
    prefix: str = ""
    shared: int = 0

    def __post_init__(self) -> None:
        for name, least in (("time", 0), ("prompt", 1), ("new", 1), ("shared", 0)):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} is {getattr(self, name)!r}; accepted: numbers >= {least}")
        if self.shared > self.prompt:
            raise ValueError(f"shared is {self.shared}; accepted: at most prompt = {self.prompt}")


def from_trace(path: Path) -> list[Asked]:
    """The requests of a trace; ValueError names the line that is none."""
    asked: list[Asked] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            item = Asked(**json.loads(line))
            if asked and item.time < asked[-1].time:
                raise ValueError(f"time is {item.time}; accepted: at least {asked[-1].time}")
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path.name}, line {number}: {error}") from error
        asked.append(item)
    return asked


def poisson(
    rate: float,
    count: int,
    prompt: int,
    new: int,
    *,
    spread: float = 0.6,
    prefixes: int = 0,
    shared: int = 0,
    seed: int = 0,
) -> list[Asked]:
    """Requests at random times, `rate` a second, of lengths with these means.

    spread             sigma of the log-normal lengths; 0: all alike
    prefixes, shared   so many system prompts of so many tokens, one before each prompt
    """
    if not rate > 0:
        raise ValueError(f"rate is {rate!r}; accepted: numbers > 0 (requests a second)")
    draw, asked, now = random.Random(seed), [], 0.0
    for _ in range(count):
        now += draw.expovariate(rate)
        own, generated = (
            max(1, round(mean * draw.lognormvariate(-(spread**2) / 2, spread)))
            for mean in (prompt, new)
        )
        name = f"system {draw.randrange(prefixes)}" if prefixes else ""
        asked.append(Asked(now, own + shared * bool(name), generated, name, shared * bool(name)))
    return asked


def tokens_of(asked: Iterable[Asked]) -> Iterator[tuple[int, ...]]:
    """Prompts of these lengths: equal where prefixes are, and different behind them."""
    beginnings: dict[str, int] = {}
    for number, item in enumerate(asked):
        first = beginnings.setdefault(item.prefix, len(beginnings))
        # ids only have to differ: a number for each request, and a negative-free one for prefixes
        start = (2 * first,) * item.shared if item.prefix else ()
        yield start + (2 * number + 1,) * (item.prompt - len(start))
