"""A plan in the making: what is promised so far, and which budgets and blocks are left.

Reads `State` and `Limits`. `schedule` and `admission` decide who comes when; the methods of `Draft`
write it down.
"""

from tcb.planning.blocks import Supply
from tcb.planning.limits import Limits
from tcb.planning.plan import BatchPlan, Blocks, Chunk, Preemption
from tcb.planning.state import Sequence, State, pages_past


class Draft:
    """The local counters of one `plan_batch` call; only its own methods write them.

    preemptions       by seq_id, in order
    admits            False once a running sequence lacks blocks: then the queue waits
    reserved_blocks   blocks that running prompts still need after this batch: the queue cannot have
                      them
    below_margin      fewer blocks are available than the safety margin
    """

    def __init__(self, state: State, limits: Limits):
        self.state = state
        self.supply = Supply(state.pool)
        self.num_groups = len(state.groups)
        self.full_groups = [g for g, group in enumerate(state.groups) if group.window is None]
        self.tokens_left, self.requests_left = limits.max_batch_tokens, limits.max_requests
        self.rows_left, self.host_left = len(state.free_rows), len(state.free_host)
        self.decodes: list[int] = []
        self.chunks: list[Chunk] = []
        self.preemptions: dict[int, Preemption] = {}
        self.admits = True
        self.reserved_blocks = 0
        self.below_margin = state.pool.available < limits.safety_margin * state.pool.num_blocks
        self._rows, self._host_slots = reversed(state.free_rows), reversed(state.free_host)

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
        """True when nothing runs and nothing is in the batch: the next sequence has all blocks."""
        return not self.state.running and not self.is_started

    @property
    def prompts_wait(self) -> bool:
        """Below the safety margin prompts wait while anything else is in the batch."""
        return self.below_margin and self.is_started

    def tokens_within_budget(self, sequence: Sequence, start: int) -> int:
        """Pending tokens from `start`, as many as the budget has.

        A prompt with forks to come pauses before its last token: there the forks leave, each to
        sample its own.
        """
        end = sequence.length
        if sequence.unforked and start < sequence.num_prompt - 1:
            end = sequence.num_prompt - 1
        return min(end - start, self.tokens_left)

    def new_pages(self, end: int, end_page: int) -> int:
        """Pages that each group needs behind `end_page` for the positions below `end`."""
        return max(0, -(-end // self.state.page_size) - end_page)

    def room_with(self, num_blocks: int, end_page: int) -> int:
        """The positions that have a slot once `num_blocks` are spent on pages behind `end_page`."""
        return (end_page + num_blocks // self.num_groups) * self.state.page_size

    def add_decodes(self, seq_ids: list[int]) -> None:
        """Promise one token to each of these sequences that have room, as the budgets allow."""
        if self.preemptions:
            seq_ids = [seq_id for seq_id in seq_ids if seq_id not in self.preemptions]
        self.decodes = seq_ids[: min(self.tokens_left, self.requests_left)]
        self.tokens_left -= len(self.decodes)
        self.requests_left -= len(self.decodes)

    def extend(self, sequence: Sequence, count: int, leaving: list[int]) -> None:
        """Promise the next `count` tokens of a running sequence, which gives `leaving` back."""
        for block in leaving:
            self.supply.release(block)
        start, end_page, groups = sequence.computed, self.end_page(sequence), self.num_groups
        new = (self.new_pages(start + count, end_page),) * groups
        self._add_chunk(
            sequence, sequence.row, start, count, (end_page,) * groups, ((),) * groups, new
        )

    def fitting(self, sequence: Sequence, start: int, end_page: int, cost: int) -> int:
        """How many tokens a waiting sequence may compute from `start`; 0 if it has to wait.

        The blocks for all its known tokens must be left, besides `cost` blocks that it shares. A
        sequence that has the pool to itself takes what there is: the limits promise that it can
        always go on page by page.
        """
        num_full = len(self.full_groups)
        count = self.tokens_within_budget(sequence, start)
        left = self.supply.left - cost - sum(self.num_restored(sequence))
        need = num_full * self.new_pages(sequence.length, end_page)
        need += (self.num_groups - num_full) * self.new_pages(start + count, end_page)
        # a preempted sequence comes back when the others have a page each to grow into, else it
        # would be preempted again
        reserve = len(self.state.running) * self.num_groups if sequence.was_running else 0
        if need + reserve + self.reserved_blocks <= left:
            return count
        if not self.has_pool_to_itself:
            return 0
        count = min(count, self.room_with(left, end_page) - start)
        assert count > 0, f"{sequence.request.id!r} fits nowhere: {left} blocks left"
        return count

    def admit(
        self,
        sequence: Sequence,
        start: int,
        end_page: int,
        first: tuple[int, ...],
        shared: tuple[Blocks, ...],
        copy_from: Blocks = (),
    ) -> bool:
        """Promise a waiting sequence that reads `shared` its tokens from `start`; False if it does
        not fit.
        """
        cost = self.supply.cost(block for blocks in shared for block in blocks)
        count = self.fitting(sequence, start, end_page, cost)
        if not count:
            return False
        for blocks in shared:
            self.supply.claim(blocks)
        new = self.new_pages(start + count, end_page)
        num_fresh = tuple([pages + new for pages in self.num_restored(sequence)])
        self.rows_left -= 1
        row = next(self._rows)
        self._add_chunk(sequence, row, start, count, first, shared, num_fresh, copy_from)
        return True

    def preempt(self, victim: Sequence) -> None:
        """Take all blocks from a running sequence: offload them if the host has room for them."""
        # pages behind the window are not worth a host slot, nor a block when the sequence comes
        # back
        kept = [
            table[pages_past(self.state, victim, g, victim.computed) :]
            for g, table in enumerate(victim.tables)
        ]
        num_blocks = sum(map(len, kept))
        preemption = Preemption(victim.seq_id, "recompute")
        if 0 < num_blocks <= self.host_left:
            self.host_left -= num_blocks
            # zip asks the table first, so that no host slot is drawn in vain
            pairs = tuple(tuple(zip(table, self._host_slots, strict=False)) for table in kept)
            preemption = Preemption(victim.seq_id, "offload", pairs)
        self.preemptions[victim.seq_id] = preemption
        self.admits = False
        for table in victim.tables:
            for block in table:
                self.supply.release(block)

    def starve(self) -> None:
        """Note that a running sequence finds no blocks: none are left for the queue."""
        self.admits = False

    def end_page(self, sequence: Sequence) -> int:
        """The page behind the last one of a running sequence."""
        return sequence.room // self.state.page_size

    def num_restored(self, sequence: Sequence) -> list[int]:
        """Pages that come back from the host, by group."""
        return [len(slots) for slots in sequence.host] or [0] * self.num_groups

    def finish(self) -> BatchPlan:
        """The frozen plan; preemptions that let nobody compute anything are left out."""
        preemptions = tuple(self.preemptions.values()) if self.is_started else ()
        return BatchPlan(tuple(self.decodes), tuple(self.chunks), preemptions)

    def _add_chunk(
        self,
        sequence: Sequence,
        row: int,
        start: int,
        count: int,
        first: tuple[int, ...],
        shared: tuple[Blocks, ...],
        num_fresh: tuple[int, ...],
        copy_from: Blocks = (),
    ) -> None:
        """Promise a chunk and take `num_fresh` blocks of each group for it, which must be left."""
        fresh = tuple([self.supply.take(pages) for pages in num_fresh])
        samples = start + count == sequence.length
        targets = [blocks[0] for blocks in fresh] if copy_from else ()
        copies = tuple(zip(copy_from, targets, strict=True))
        # an offloaded sequence has its pages back in the first of its new blocks
        restored = zip(sequence.host, fresh, strict=False)
        restore = tuple([p for slots, own in restored for p in zip(slots, own, strict=False)])
        self.chunks.append(
            Chunk(
                sequence.seq_id, row, start, count, samples, first, shared, fresh, copies, restore
            )
        )
        self.tokens_left -= count
        self.requests_left -= 1
        if not samples:
            end_page = -(-(start + count) // self.state.page_size)
            pages = self.new_pages(sequence.length, end_page)
            self.reserved_blocks += len(self.full_groups) * pages
