"""What monitors read of a running engine, under the names that transformers gives it.

Views only: nothing is kept here, nothing is written, and what is read may be a step old.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tcb.engine import Engine
from tcb.planning.state import Sequence


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """Which requests run and which wait."""

    engine: Engine

    @property
    def active_requests(self) -> Mapping[str, Sequence]:
        """Running sequences by request id."""
        return {s.request.id: s for s in tuple(self.engine.state.running.values())}

    @property
    def waiting_requests(self) -> Mapping[str, Sequence]:
        """Waiting sequences by request id."""
        return {s.request.id: s for s in tuple(self.engine.state.waiting.values())}

    def has_pending_requests(self) -> bool:
        """Whether anything waits, runs or flies."""
        return self.engine.has_work


@dataclass(frozen=True, slots=True)
class CacheView:
    """The sizes of the cache; blocks are counted as the configuration counts them, all layers to
    a block.
    """

    engine: Engine

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.engine.limits.page_size

    block_size = page_size

    @property
    def num_blocks(self) -> int:
        """Blocks of all layers together."""
        return self.engine.limits.num_blocks // len(self.engine.state.groups)

    @property
    def max_batch_tokens(self) -> int:
        """Most tokens in one batch."""
        return self.engine.limits.max_batch_tokens

    @property
    def use_prefix_sharing(self) -> bool:
        """Whether blocks of equal content are shared."""
        return self.engine.limits.share_prefixes


@dataclass(frozen=True, slots=True)
class ProcessorView:
    """The engine, as transformers' batch processor shows it."""

    engine: Engine

    @property
    def scheduler(self) -> SchedulerView:
        """Which requests run and which wait."""
        return SchedulerView(self.engine)

    @property
    def cache(self) -> CacheView:
        """The sizes of the cache."""
        return CacheView(self.engine)

    def has_pending_requests(self) -> bool:
        """Whether anything waits, runs or flies."""
        return self.engine.has_work


@dataclass(frozen=True, slots=True)
class OneRank:
    """What transformers' distributed helper says of a process that is alone."""

    global_rank: int = 0
    tp_size: int = 1
    is_tp_driver: bool = True

    def destroy_cpu_comm_group(self) -> None:
        """There is no group."""
