"""What the engine knows of every sequence; only the `apply_*` functions write it.

The records are plain mutable Python: to replace frozen ones one by one costs several milliseconds a
step at a thousand sequences.
"""

import sys
from collections import OrderedDict
from dataclasses import dataclass, field

from tcb.planning.blocks import BlockPool, extend_hashes
from tcb.planning.groups import LayerGroup, num_columns
from tcb.planning.limits import Limits
from tcb.planning.plan import BatchPlan, Chunk, Preemption, SampledTokens
from tcb.planning.request import Request

NO_ROW = -1
NEVER = sys.maxsize


@dataclass(slots=True, eq=False)
class Sequence:
    """The engine's record of one request.

    Of `length` positions, `in_flight` have their tokens on the device only; `computed` have their
    keys and values in the cache once the launched batches land; the others are pending. At most
    `limit` tokens are generated; when there are more than `hash_next_at`, another page can be
    hashed and found. Generated tokens stand apart from the prompt: a decode touches nothing that a
    long context has pushed out of the processor's caches.

    `tables[g]` are the blocks of the pages first[g], first[g] + 1, ...; the tables of all groups
    end at the same page, and positions below `room` have a slot. A page that has left the window is
    given back when the sequence next gets a page. Pages of 4, a full group and one with a window of
    6 and three columns:

        position        0-3   4-7   8-11  12-15 16-19     computed 18, length 19, room 20
        page            0     1     2     3     4
        tables[0]       7     2     9     4     1         first[0] = 0
        tables[1]                         5     8         first[1] = 3, page 2 has left the window
        column          0     1     2     0     1         page % 3: page 4 lies where page 1 did
    """

    seq_id: int
    request: Request
    num_prompt: int
    limit: int
    first: list[int]
    tables: list[list[int]]
    generated: list[int] = field(default_factory=list)
    computed: int = 0
    in_flight: int = 0
    room: int = 0
    row: int = NO_ROW
    block_hashes: list[bytes] = field(default_factory=list)
    hash_next_at: int = NEVER
    host: list[list[int]] = field(default_factory=list)
    parent: int | None = None
    unforked: int = 0
    logprobs: list[float] = field(default_factory=list)
    timestamps: list[float] = field(default_factory=list)
    started: float = -1.0
    error: str | None = None

    @property
    def length(self) -> int:
        """Positions that exist: known tokens and those still on the device."""
        return self.num_known + self.in_flight

    @property
    def num_known(self) -> int:
        """Tokens that the host knows."""
        return self.num_prompt + len(self.generated)

    @property
    def was_running(self) -> bool:
        """True once the sequence was in a batch: when it waits, it was preempted."""
        return self.started >= 0

    def known(self, start: int = 0, end: int = NEVER) -> list[int]:
        """A copy of the known tokens from position `start` to before `end`; all by default."""
        prompt = self.num_prompt
        new = self.generated[max(start - prompt, 0) : max(end - prompt, 0)]
        return [*self.request.prompt[start:end], *new] if start < prompt else new


@dataclass(slots=True, eq=False)
class State:
    """All sequences, all blocks, all rows; `waiting` and `running` partition the live sequences."""

    limits: Limits
    page_size: int
    groups: tuple[LayerGroup, ...]
    # the groups that have a window
    sliding: tuple[int, ...]
    columns: tuple[int, ...]
    pool: BlockPool
    free_rows: list[int]
    free_host: list[int]
    waiting: "OrderedDict[int, Sequence]" = field(default_factory=OrderedDict)
    running: dict[int, Sequence] = field(default_factory=dict)
    seq_ids: dict[str, int] = field(default_factory=dict)
    next_seq_id: int = 0

    def find(self, seq_id: int) -> Sequence | None:
        """The live sequence of this id, if there is one."""
        return self.running.get(seq_id) or self.waiting.get(seq_id)

    def live(self, seq_id: int) -> Sequence:
        """The live sequence of this id, which must be one."""
        return self.running.get(seq_id) or self.waiting[seq_id]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What landing a batch changed: sequences that ended, and streaming ones with a new token."""

    finished: tuple[Sequence, ...]
    streamed: tuple[Sequence, ...]


def new_state(groups: tuple[LayerGroup, ...], limits: Limits) -> State:
    """An empty state for these layer groups."""
    page_size = limits.page_size
    return State(
        limits=limits,
        page_size=page_size,
        groups=groups,
        sliding=tuple(g for g, group in enumerate(groups) if group.window is not None),
        columns=tuple(
            num_columns(group.window, page_size, limits.max_batch_tokens, limits.max_length)
            for group in groups
        ),
        pool=BlockPool(limits.num_blocks, len(groups)),
        free_rows=list(range(limits.max_requests - 1, -1, -1)),
        free_host=list(range(limits.host_blocks - 1, -1, -1)),
    )


def apply_arrival(state: State, request: Request) -> Sequence:
    """Queue a request; its id must not be that of a live one. Returns the new sequence."""
    assert request.id not in state.seq_ids, f"request {request.id!r} is live already"
    seq_id, num_groups = state.next_seq_id, len(state.groups)
    sequence = Sequence(
        seq_id=seq_id,
        request=request,
        num_prompt=len(request.prompt),
        limit=min(request.max_new_tokens, state.limits.room_after(len(request.prompt))),
        first=[0] * num_groups,
        tables=[[] for _ in range(num_groups)],
    )
    if state.limits.share_prefixes:
        sequence.hash_next_at = state.page_size - sequence.num_prompt
        extend_hashes(sequence.block_hashes, request.prompt, state.page_size)
        _join_parent(state, sequence)
    state.next_seq_id += 1
    state.seq_ids[request.id] = seq_id
    state.waiting[seq_id] = sequence
    return sequence


def apply_cancel(state: State, request_id: str) -> list[Sequence]:
    """End a live request and its forks that have not begun. Returns the ended sequences."""
    seq_id = state.seq_ids.get(request_id)
    if seq_id is None:
        return []
    ended = [state.live(seq_id)]
    ended += [s for s in state.waiting.values() if s.parent == seq_id and s.row == NO_ROW]
    for sequence in ended:
        _end(state, sequence)
    return ended


def apply_new_weights(state: State) -> None:
    """Forget every key and value: all sequences compute theirs again. No batch may be in flight."""
    for sequence in sorted(state.running.values(), key=lambda s: -s.seq_id):
        assert sequence.in_flight == 0, f"{sequence.request.id!r} has a token in flight"
        _to_waiting(state, sequence)
        _restart(sequence)
    for sequence in state.waiting.values():
        if sequence.host:
            _leave_host(state, sequence)
            _restart(sequence)
    state.pool.forget_all()


def apply_plan(state: State, plan: BatchPlan, now: float = 0.0) -> None:
    """Record that this batch is launched: blocks change hands, progress is counted. Writes State,
    never the plan.
    """
    for preemption in plan.preemptions:
        _apply_preemption(state, preemption)
    running = state.running
    for seq_id in plan.decodes:
        sequence = running[seq_id]
        sequence.computed += 1
        sequence.in_flight += 1
    # before anything is dropped: a fork may share a page that its parent leaves in this batch
    for block in (block for chunk in plan.chunks for blocks in chunk.shared for block in blocks):
        state.pool.share(block)
    for chunk in plan.chunks:
        _apply_chunk(state, chunk, now)


def apply_results(
    state: State, plan: BatchPlan, results: SampledTokens, now: float = 0.0
) -> StepOutput:
    """Append a landed batch's tokens and end what is complete; tokens of ended ones are dropped."""
    finished, streamed = [], []
    running, waiting, logprobs = state.running, state.waiting, results.logprobs
    for place, (seq_id, token) in enumerate(zip(plan.sample_seq_ids, results.tokens, strict=True)):
        sequence = running.get(seq_id) or waiting.get(seq_id)
        if sequence is None:
            continue
        request, generated = sequence.request, sequence.generated
        sequence.in_flight -= 1
        if token < 0:
            sequence.error = results.errors.get(seq_id, "the model's logits are not finite")
            finished.append(sequence)
            continue
        generated.append(token)
        if logprobs is not None:
            sequence.logprobs.append(logprobs[place])
        if request.record_timestamps:
            sequence.timestamps.append(now)
        count, ended = len(generated), token in request.eos
        if count > sequence.hash_next_at:
            _register_pages(state, sequence)
        if (count >= sequence.limit or request.stop is not None) and not ended:
            ended, sequence.error = state.limits.has_ended(request, generated)
        if ended:
            finished.append(sequence)
        elif request.streaming:
            streamed.append(sequence)
    for sequence in finished:
        _end(state, sequence)
    return StepOutput(tuple(finished), tuple(streamed))


def pages_past(state: State, sequence: Sequence, group: int, position: int) -> int:
    """How many of this table's first pages no query at `position` or later may read."""
    window = state.groups[group].window
    if window is None:
        return 0
    left = (position - window + 1) // state.page_size - sequence.first[group]
    return min(left, len(sequence.tables[group])) if left > 0 else 0


def _join_parent(state: State, sequence: Sequence) -> None:
    """A fork waits for its parent's prompt, unless there is nothing to share with it."""
    parent = state.find(state.seq_ids.get(sequence.request.parent or "", -1))
    if parent is None or sequence.num_prompt < 2 or parent.computed >= sequence.num_prompt:
        return
    assert parent.request.prompt == sequence.request.prompt, "a fork has its parent's prompt"
    sequence.parent = parent.seq_id
    parent.unforked += 1


def _leave_parent(state: State, sequence: Sequence) -> None:
    if sequence.parent is not None:
        parent = state.find(sequence.parent)
        if parent is not None:
            parent.unforked -= 1
        sequence.parent = None


def _apply_chunk(state: State, chunk: Chunk, now: float) -> None:
    sequence = state.running.get(chunk.seq_id)
    if sequence is None:
        sequence = _admit(state, chunk, now)
    _drop_past(state, sequence, chunk.start)
    pool = state.pool
    for g, table in enumerate(sequence.tables):
        if not table:
            sequence.first[g] = chunk.first[g]
        for block in chunk.fresh[g]:
            pool.take(block)
        table += chunk.shared[g]
        table += chunk.fresh[g]
    sequence.computed = chunk.end
    sequence.in_flight += chunk.samples
    sequence.room = (sequence.first[0] + len(sequence.tables[0])) * state.page_size
    if sequence.computed - sequence.num_prompt >= sequence.hash_next_at:
        _register_pages(state, sequence)
    if chunk.count > 1:
        # after one token hardly any page leaves: that is found out when the next page is needed
        _drop_past(state, sequence, sequence.computed)


def _admit(state: State, chunk: Chunk, now: float) -> Sequence:
    sequence = state.waiting.pop(chunk.seq_id)
    _leave_parent(state, sequence)
    _leave_host(state, sequence)
    _pop_named(state.free_rows, chunk.row)
    state.running[chunk.seq_id] = sequence
    sequence.row = chunk.row
    if not sequence.was_running:
        sequence.started = now
    if state.limits.share_prefixes:
        # pages that were registered in blocks now lost are registered again
        sequence.hash_next_at = state.page_size - sequence.num_prompt
    return sequence


def _apply_preemption(state: State, preemption: Preemption) -> None:
    sequence = state.running[preemption.seq_id]
    if preemption.kind == "offload":
        _drop_past(state, sequence, sequence.computed)
        host = [[slot for _, slot in pairs] for pairs in preemption.offload]
        for slot in (slot for slots in host for slot in slots):
            _pop_named(state.free_host, slot)
        _to_waiting(state, sequence)
        sequence.host = host
    else:
        _to_waiting(state, sequence)
        _restart(sequence)


def _to_waiting(state: State, sequence: Sequence) -> None:
    """Take a running sequence's row and blocks away and put it first in the queue."""
    del state.running[sequence.seq_id]
    _release(state, sequence)
    state.waiting[sequence.seq_id] = sequence
    state.waiting.move_to_end(sequence.seq_id, last=False)


def _pop_named(stack: list[int], name: int) -> None:
    assert stack[-1] == name, f"a plan named {name} where {stack[-1]} is handed out"
    stack.pop()


def _restart(sequence: Sequence) -> None:
    sequence.computed = 0
    sequence.first = [0] * len(sequence.first)


def _leave_host(state: State, sequence: Sequence) -> None:
    for slots in sequence.host:
        state.free_host.extend(reversed(slots))
    sequence.host = []


def _end(state: State, sequence: Sequence) -> None:
    state.running.pop(sequence.seq_id, None)
    state.waiting.pop(sequence.seq_id, None)
    del state.seq_ids[sequence.request.id]
    _leave_parent(state, sequence)
    _leave_host(state, sequence)
    _release(state, sequence)


def _release(state: State, sequence: Sequence) -> None:
    """Give row and blocks back, the deepest page first: a prefix outlives what follows it."""
    if sequence.row != NO_ROW:
        state.free_rows.append(sequence.row)
        sequence.row = NO_ROW
    tables = sequence.tables
    for depth in range(1, max(map(len, tables)) + 1):
        for table in tables:
            if depth <= len(table):
                state.pool.drop(table[-depth])
    for table in tables:
        table.clear()
    sequence.room = 0


def _drop_past(state: State, sequence: Sequence, position: int) -> None:
    """Give back the pages that have left the window of every query at `position` and later."""
    for g in state.sliding:
        count = pages_past(state, sequence, g, position)
        if count:
            table = sequence.tables[g]
            for block in table[:count]:
                state.pool.drop(block)
            del table[:count]
            sequence.first[g] += count


def _register_pages(state: State, sequence: Sequence) -> None:
    """Register every page whose tokens are known and whose keys and values are launched."""
    page_size, block_hashes = state.page_size, sequence.block_hashes
    registered = (sequence.hash_next_at + sequence.num_prompt) // page_size - 1
    full = min(sequence.computed, sequence.num_known) // page_size
    if full > len(block_hashes):
        extend_hashes(block_hashes, sequence.known(len(block_hashes) * page_size), page_size)
    for g, (table, first) in enumerate(zip(sequence.tables, sequence.first, strict=True)):
        for page in range(max(registered, first), min(full, first + len(table))):
            state.pool.register(table[page - first], g, block_hashes[page])
    sequence.hash_next_at = (max(full, registered) + 1) * page_size - sequence.num_prompt
