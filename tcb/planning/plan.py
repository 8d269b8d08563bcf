"""The decision about one batch and what it brings home, as frozen values: they can be printed,
compared, stored and replayed.

Knows nothing of how it was reached or of what it costs to carry out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Blocks = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions [start, start + count) of one sequence, and the blocks that it gets for them.

    first, shared, fresh have one entry a layer group: the logical page of the first new block, the
    blocks read together with others (a prefix hit or a fork), the blocks it alone will write.
    copies are (source, target) blocks whose content must be copied first (the last, partly filled
    page of a fork); restore are (host slot, block) pairs.
    """

    seq_id: int
    row: int
    start: int
    count: int
    samples: bool
    first: tuple[int, ...]
    shared: tuple[Blocks, ...]
    fresh: tuple[Blocks, ...]
    copies: Pairs = ()
    restore: Pairs = ()

    @property
    def end(self) -> int:
        """The position behind the chunk."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Preemption:
    """A sequence that gives its blocks back: to be computed again later, or with its content kept
    in host slots.

    offload has a (block, host slot) pair for every block that a later query may read, by group,
    in the order of the tables.
    """

    seq_id: int
    kind: Literal["recompute", "offload"]
    offload: tuple[Pairs, ...] = ()


@dataclass(frozen=True)
class BatchPlan:
    """What the next batch is.

    decodes are sequences that compute one token in room they already have: nothing else needs
    saying about them. chunks are all others, in the order in which their blocks were chosen.
    preemptions come before both.
    """

    decodes: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    preemptions: tuple[Preemption, ...]

    @cached_property
    def ordered_chunks(self) -> tuple[Chunk, ...]:
        """Chunks as they lie in the batch, behind the decodes: single tokens first."""
        return tuple(sorted(self.chunks, key=lambda chunk: chunk.count > 1))

    @cached_property
    def sample_seq_ids(self) -> tuple[int, ...]:
        """The sequences that sample a token in this batch, in batch order."""
        return self.decodes + tuple(chunk.seq_id for chunk in self.ordered_chunks if chunk.samples)

    @property
    def is_empty(self) -> bool:
        """True when nothing is computed."""
        return not self.decodes and not self.chunks

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch."""
        return len(self.decodes) + sum(chunk.count for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What one batch brought home: a token (and its log-probability) for each of the plan's
    `sample_seq_ids`.

    A negative token means that the sample failed; `errors` may say why, by seq_id.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float] | None = None
    errors: dict[int, str] = field(default_factory=dict)
