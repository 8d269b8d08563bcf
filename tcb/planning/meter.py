"""Counts what the batches of an engine do, in a few additions a step."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from tcb.planning.plan import BatchPlan

# seconds between two marks, and how many are kept: rates are those of the last ten seconds or so
_BETWEEN, _MARKS = 1.0, 10


@dataclass(slots=True)
class Meter:
    """Sums since the engine was built.

    steps               batches launched
    prefill_tokens      positions computed in chunks of more than one, or that sample nothing
    decode_tokens       positions computed one at a time, a token sampled from each
    prefix_hit_tokens   positions that were read in place of being computed: prefix hits and forks
    preemptions         sequences that gave their blocks back before their end
    busy_seconds        in steps, host and device together
    wait_seconds        of these, in which the host waited for the device
    """

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    busy_seconds: float = 0.0
    wait_seconds: float = 0.0
    _marks: deque[tuple[float, int, int, int]] = field(default_factory=lambda: deque(maxlen=_MARKS))

    def add(self, plan: BatchPlan) -> None:
        """Count a batch that is launched."""
        self.steps += 1
        self.decode_tokens += len(plan.decodes)
        self.preemptions += len(plan.preemptions)
        for chunk in plan.chunks:
            if chunk.count == 1 and chunk.samples:
                self.decode_tokens += 1
            else:
                self.prefill_tokens += chunk.count
            if any(chunk.shared):
                self.prefix_hit_tokens += chunk.start

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the body as spent waiting for the device."""
        began = perf_counter()
        yield
        self.wait_seconds += perf_counter() - began

    def add_seconds(self, seconds: float) -> None:
        """Count the time of a step."""
        if not self._marks:
            self._marks.append((0.0, 0, 0, 0))
        self.busy_seconds += seconds
        if self.busy_seconds >= self._marks[-1][0] + _BETWEEN:
            counts = self.prefill_tokens, self.decode_tokens, self.steps
            self._marks.append((self.busy_seconds, *counts))

    def rates(self) -> tuple[float, float, float]:
        """Prefill and decode tokens a second, and seconds a step, over the latest busy seconds; 0
        before the first step.
        """
        if not self._marks:
            return 0.0, 0.0, 0.0
        since, prefill, decode, steps = self._marks[0]
        seconds = self.busy_seconds - since
        if not seconds:
            return 0.0, 0.0, 0.0
        return (
            (self.prefill_tokens - prefill) / seconds,
            (self.decode_tokens - decode) / seconds,
            seconds / (self.steps - steps),
        )
