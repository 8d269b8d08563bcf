"""A plan in the making: what is promised so far, and what budgets and blocks are left.

Reads `State` and `Limits`, writes neither; decides nothing about order (`schedule`, `admission`).
"""

from tcb.planning.limits import Limits
from tcb.planning.plan import BatchPlan, Blocks, Chunk, Pairs, Preemption
from tcb.planning.state import Sequence, State
from tcb.planning.supply import Supply


class Draft:
    """The local counters of one `plan_batch` call."""

    def __init__(self, state: State, limits: Limits):
        self.state = state
        self.limits = limits
        self.supply = Supply(state.pool)
        self.num_groups = len(state.groups)
        self.full = [g for g, group in enumerate(state.groups) if group.window is None]
        self.tokens_left = limits.max_batch_tokens
        self.requests_left = limits.max_requests
        self.decodes: list[int] = []
        self.chunks: list[Chunk] = []
        self.preemptions: list[Preemption] = []
        self.preempted: set[int] = set()
        # blocks that running prompts still need after this batch: the queue cannot have them
        self.reserved_blocks = 0
        self.lacks_blocks = False
        self.below_margin = state.pool.available < limits.safety_margin * state.pool.num_blocks
        self.rows = reversed(state.free_rows)
        self.rows_left = len(state.free_rows)
        self.host = reversed(state.free_host)
        self.host_left = len(state.free_host)

    @property
    def is_full(self) -> bool:
        """True when the batch takes no more tokens or no more sequences."""
        return self.tokens_left == 0 or self.requests_left == 0

    @property
    def is_started(self) -> bool:
        """True when anything is in the batch."""
        return bool(self.decodes or self.chunks)

    @property
    def has_pool_to_itself(self) -> bool:
        """True when nothing runs and nothing is in the batch: what comes next has all blocks."""
        return not self.state.running and not self.is_started

    @property
    def prompts_wait(self) -> bool:
        """Below the safety margin prompts wait while anything else is in the batch."""
        return self.below_margin and self.is_started

    def tokens_within_budget(self, sequence: Sequence, start: int) -> int:
        """Tokens that the sequence would compute from `start`: all pending ones that the budget
        admits.

        A prompt with forks to come pauses before its last token: there the forks leave, each to
        sample its own.
        """
        end = sequence.length
        if sequence.unforked and start < sequence.num_prompt - 1:
            end = sequence.num_prompt - 1
        return min(end - start, self.tokens_left)

    def new_pages(self, end: int, end_page: int) -> int:
        """Pages to add behind `end_page` so that positions below `end` have a slot; every group
        needs each of them.
        """
        return max(0, -(-end // self.state.page_size) - end_page)

    def room_with(self, end_page: int, num_blocks: int) -> int:
        """The first position without a slot when `num_blocks` are spent on pages behind
        `end_page`.
        """
        return (end_page + num_blocks // self.num_groups) * self.state.page_size

    def add_decodes(self, seq_ids: list[int]) -> None:
        """Promise one token to each of these sequences that have room, as far as the budgets go."""
        self.decodes = seq_ids[: min(self.tokens_left, self.requests_left)]
        self.tokens_left -= len(self.decodes)
        self.requests_left -= len(self.decodes)

    def add_chunk(
        self,
        sequence: Sequence,
        row: int,
        start: int,
        count: int,
        *,
        first: tuple[int, ...],
        shared: tuple[Blocks, ...],
        num_fresh: tuple[int, ...],
        copy_from: Blocks = (),
    ) -> Chunk:
        """Promise `count` tokens from `start` and take the blocks for them; there must be enough in
        the supply.
        """
        fresh = tuple([self.supply.take(pages) for pages in num_fresh])
        targets = [blocks[0] for blocks in fresh] if copy_from else ()
        chunk = Chunk(
            seq_id=sequence.seq_id,
            row=row,
            start=start,
            count=count,
            samples=start + count == sequence.length,
            first=first,
            shared=shared,
            fresh=fresh,
            copies=tuple(zip(copy_from, targets, strict=True)),
            restore=_restored(sequence, fresh),
        )
        self.chunks.append(chunk)
        self.tokens_left -= count
        self.requests_left -= 1
        if not chunk.samples:
            end_page = -(-chunk.end // self.state.page_size)
            self.reserved_blocks += len(self.full) * self.new_pages(sequence.length, end_page)
        return chunk

    def finish(self) -> BatchPlan:
        """The frozen plan; preemptions that let nobody compute anything are left out."""
        preemptions = tuple(self.preemptions) if self.is_started else ()
        return BatchPlan(tuple(self.decodes), tuple(self.chunks), preemptions)


def _restored(sequence: Sequence, fresh: tuple[Blocks, ...]) -> Pairs:
    """Host slots of an offloaded sequence with the first of its new blocks, group by group."""
    if sequence.host is None:
        return ()
    groups = zip(sequence.host, fresh, strict=True)
    return tuple(pair for slots, blocks in groups for pair in zip(slots, blocks, strict=False))
