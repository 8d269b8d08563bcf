"""What the engine knows of every sequence; the `apply_*` functions are the only writers in the
package.

Knows nothing of why something was decided (`schedule`) or of tensors. It is plain mutable Python on
purpose: replacing frozen records one by one cost several milliseconds a step at a thousand
sequences.
"""

import sys
from collections import OrderedDict
from dataclasses import dataclass, field

from tcb.planning.blocks import ROOT_DIGEST, BlockPool, page_digest
from tcb.planning.config import Limits
from tcb.planning.groups import LayerGroup, num_columns
from tcb.planning.plan import BatchPlan, Chunk, Preemption, SampledTokens
from tcb.planning.request import Request

NO_ROW = -1
NEVER = sys.maxsize


@dataclass(slots=True, eq=False)
class Sequence:
    """The engine's record of one request.

    Of `length` positions, `in_flight` have their tokens on the device only; `computed` have their
    keys and values in the cache once the launched batches land, the others are pending. Generated
    tokens stand apart from the prompt: a decode touches nothing that a long context has pushed out
    of the processor's caches. At most `limit` are generated; when there are more than `next_index`,
    another page can be indexed. `tables[g]` are the blocks of the pages `first[g], first[g] + 1,
    ...`; all groups end at the same page, so positions below `room` have a slot.
    """

    key: int
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
    digests: list[bytes] = field(default_factory=list)
    indexed: int = 0
    next_index: int = NEVER
    host: list[list[int]] | None = None
    relieved: bool = False
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

    def known(self, start: int = 0, end: int = NEVER) -> list[int]:
        """A copy of the known tokens from position `start` to before `end`; all by default."""
        prompt = self.num_prompt
        new = self.generated[max(start - prompt, 0) : max(end - prompt, 0)]
        return [*self.request.prompt[start:end], *new] if start < prompt else new


@dataclass(slots=True, eq=False)
class State:
    """All sequences, all blocks, all rows; `waiting` and `running` partition the live sequences."""

    page_size: int
    groups: tuple[LayerGroup, ...]
    # the groups that have a window
    sliding: tuple[int, ...]
    columns: tuple[int, ...]
    share: bool
    pool: BlockPool
    free_rows: list[int]
    free_host: list[int]
    waiting: "OrderedDict[int, Sequence]" = field(default_factory=OrderedDict)
    running: dict[int, Sequence] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)
    next_key: int = 0

    def find(self, key: int) -> Sequence | None:
        """The live sequence of this key."""
        return self.running.get(key) or self.waiting.get(key)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What landing a batch changed: sequences that ended, and streaming ones that go on with one
    more token.
    """

    finished: tuple[Sequence, ...]
    streamed: tuple[Sequence, ...]


def new_state(groups: tuple[LayerGroup, ...], limits: Limits) -> State:
    """An empty state for these layer groups."""
    page_size = limits.page_size
    return State(
        page_size=page_size,
        groups=groups,
        sliding=tuple(g for g, group in enumerate(groups) if group.window is not None),
        columns=tuple(
            num_columns(group.window, page_size, limits.max_batch_tokens, limits.max_length)
            for group in groups
        ),
        share=limits.share_prefixes,
        pool=BlockPool(limits.num_blocks, len(groups)),
        free_rows=list(range(limits.max_requests - 1, -1, -1)),
        free_host=list(range(limits.host_blocks - 1, -1, -1)),
    )


def apply_arrival(state: State, request: Request) -> Sequence:
    """Queue a request; its id must not be that of a live one. Returns the new sequence."""
    assert request.id not in state.keys, f"request {request.id!r} is live already"
    key, num_groups = state.next_key, len(state.groups)
    sequence = Sequence(
        key=key,
        request=request,
        num_prompt=len(request.prompt),
        limit=request.max_new_tokens,
        first=[0] * num_groups,
        tables=[[] for _ in range(num_groups)],
    )
    if state.share:
        sequence.next_index = state.page_size - sequence.num_prompt
        _extend_digests(state, sequence)
        _join_parent(state, sequence)
    state.next_key += 1
    state.keys[request.id] = key
    state.waiting[key] = sequence
    return sequence


def apply_cancel(state: State, request_id: str) -> list[Sequence]:
    """End a live request, and the forks of it that have not begun. Returns the sequences that
    ended.
    """
    key = state.keys.get(request_id)
    if key is None:
        return []
    ended = [state.find(key)]
    ended += [s for s in state.waiting.values() if s.parent == key and s.row == NO_ROW]
    for sequence in ended:
        _end(state, sequence)
    return ended


def apply_new_weights(state: State) -> None:
    """Forget every key and value: all sequences compute theirs again. No batch may be in flight."""
    for sequence in sorted(state.running.values(), key=lambda s: -s.key):
        assert sequence.in_flight == 0, f"{sequence.request.id!r} has a token in flight"
        _to_waiting(state, sequence)
        _restart(sequence)
    for sequence in state.waiting.values():
        if sequence.host is not None:
            _leave_host(state, sequence)
            _restart(sequence)
    state.pool.forget_all()


def apply_plan(state: State, plan: BatchPlan, now: float = 0.0) -> None:
    """Record that this batch is launched: blocks change hands, progress is counted. Writes State,
    never the plan.
    """
    for relief in plan.relief:
        _apply_relief(state, relief)
    running = state.running
    for key in plan.decodes:
        sequence = running[key]
        sequence.computed += 1
        sequence.in_flight += 1
    # before anything is dropped: a fork may share a page that its parent leaves behind in this
    # batch
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
    for index, (key, token) in enumerate(zip(plan.sample_keys, results.tokens, strict=True)):
        sequence = running.get(key) or waiting.get(key)
        if sequence is None:
            continue
        request, generated = sequence.request, sequence.generated
        sequence.in_flight -= 1
        if token < 0:
            sequence.error = results.errors.get(key, "the model's logits are not finite")
            finished.append(sequence)
            continue
        generated.append(token)
        if logprobs is not None:
            sequence.logprobs.append(logprobs[index])
        if request.record_timestamps:
            sequence.timestamps.append(now)
        if token in request.eos or len(generated) >= sequence.limit:
            finished.append(sequence)
        else:
            if len(generated) > sequence.next_index:
                _index_pages(state, sequence)
            if request.streaming:
                streamed.append(sequence)
    for sequence in finished:
        if sequence.error is None and len(sequence.generated) > sequence.next_index:
            _index_pages(state, sequence)
        _end(state, sequence)
    return StepOutput(tuple(finished), tuple(streamed))


def pages_left(state: State, sequence: Sequence, group: int, position: int) -> int:
    """How many of the first pages of this table no query at `position` or later may read. Reads
    only.
    """
    window = state.groups[group].window
    if window is None:
        return 0
    left = (position - window + 1) // state.page_size - sequence.first[group]
    return min(left, len(sequence.tables[group])) if left > 0 else 0


def _join_parent(state: State, sequence: Sequence) -> None:
    """A fork waits for its parent's prompt, unless there is nothing to share with it."""
    parent = state.find(state.keys.get(sequence.request.parent, -1))
    if parent is None or sequence.num_prompt < 2 or parent.computed >= sequence.num_prompt:
        return
    assert parent.request.prompt == sequence.request.prompt, "a fork has its parent's prompt"
    sequence.parent = parent.key
    parent.unforked += 1


def _leave_parent(state: State, sequence: Sequence) -> None:
    if sequence.parent is not None:
        parent = state.find(sequence.parent)
        if parent is not None:
            parent.unforked -= 1
        sequence.parent = None


def _apply_chunk(state: State, chunk: Chunk, now: float) -> None:
    sequence = state.running.get(chunk.key)
    if sequence is None:
        sequence = _admit(state, chunk, now)
    _drop_left(state, sequence, chunk.start)
    pool = state.pool
    for g, table in enumerate(sequence.tables):
        if not table:
            sequence.first[g] = chunk.first[g]
        for block in chunk.fresh[g]:
            pool.take(block)
        table += chunk.shared[g]
        table += chunk.fresh[g]
    sequence.computed = chunk.start + chunk.count
    sequence.in_flight += chunk.samples
    sequence.room = (sequence.first[0] + len(sequence.tables[0])) * state.page_size
    if sequence.computed - sequence.num_prompt >= sequence.next_index:
        _index_pages(state, sequence)
    if chunk.count > 1:
        # after one token hardly any page leaves: that is found out when the next page is needed
        _drop_left(state, sequence, sequence.computed)


def _admit(state: State, chunk: Chunk, now: float) -> Sequence:
    sequence = state.waiting.pop(chunk.key)
    _leave_parent(state, sequence)
    _pop_named(state.free_rows, chunk.row)
    state.running[chunk.key] = sequence
    sequence.row = chunk.row
    sequence.relieved = False
    if sequence.started < 0:
        sequence.started = now
    if sequence.host is not None:
        _leave_host(state, sequence)
    sequence.indexed = 0
    if state.share:
        sequence.next_index = state.page_size - sequence.num_prompt
    return sequence


def _apply_relief(state: State, relief: Preemption) -> None:
    sequence = state.running[relief.key]
    if relief.kind == "offload":
        _drop_left(state, sequence, sequence.computed)
        host = [[slot for _, slot in pairs] for pairs in relief.offload]
        for slot in (slot for slots in host for slot in slots):
            _pop_named(state.free_host, slot)
        _to_waiting(state, sequence)
        sequence.host = host
    else:
        _to_waiting(state, sequence)
        _restart(sequence)


def _to_waiting(state: State, sequence: Sequence) -> None:
    """Take a running sequence's row and blocks away and put it first in the queue."""
    del state.running[sequence.key]
    _drop_all(state, sequence)
    _free_row(state, sequence)
    sequence.relieved = True
    state.waiting[sequence.key] = sequence
    state.waiting.move_to_end(sequence.key, last=False)


def _pop_named(stack: list[int], name: int) -> None:
    assert stack[-1] == name, f"a plan named {name} where {stack[-1]} is handed out"
    stack.pop()


def _restart(sequence: Sequence) -> None:
    sequence.computed = 0
    sequence.first = [0] * len(sequence.first)


def _leave_host(state: State, sequence: Sequence) -> None:
    for slots in sequence.host:
        state.free_host.extend(reversed(slots))
    sequence.host = None


def _end(state: State, sequence: Sequence) -> None:
    _leave_parent(state, sequence)
    state.running.pop(sequence.key, None)
    state.waiting.pop(sequence.key, None)
    del state.keys[sequence.request.id]
    if sequence.host is not None:
        _leave_host(state, sequence)
    _drop_all(state, sequence)
    _free_row(state, sequence)


def _free_row(state: State, sequence: Sequence) -> None:
    if sequence.row != NO_ROW:
        state.free_rows.append(sequence.row)
        sequence.row = NO_ROW


def _drop_all(state: State, sequence: Sequence) -> None:
    """Give all blocks back, the deepest page first: a prefix outlives what follows it."""
    pool, tables = state.pool, sequence.tables
    for depth in range(1, max(map(len, tables)) + 1):
        for table in tables:
            if depth <= len(table):
                pool.drop(table[-depth])
    for table in tables:
        table.clear()
    sequence.room = 0


def _drop_left(state: State, sequence: Sequence, position: int) -> None:
    """Give back the pages that have left the window of every query at `position` and later."""
    for g in state.sliding:
        count = pages_left(state, sequence, g, position)
        if count:
            table = sequence.tables[g]
            for block in table[:count]:
                state.pool.drop(block)
            del table[:count]
            sequence.first[g] += count


def _extend_digests(state: State, sequence: Sequence) -> None:
    """Hash every full page of known tokens that has no digest yet."""
    page_size, digests = state.page_size, sequence.digests
    for page in range(len(digests), sequence.num_known // page_size):
        parent = digests[-1] if digests else ROOT_DIGEST
        tokens = sequence.known(page * page_size, (page + 1) * page_size)
        digests.append(page_digest(parent, tokens))


def _index_pages(state: State, sequence: Sequence) -> None:
    """Let every page be found whose tokens are known and whose keys and values are computed or
    launched.
    """
    full = min(sequence.computed, sequence.num_known) // state.page_size
    if full > len(sequence.digests):
        _extend_digests(state, sequence)
    for g, table in enumerate(sequence.tables):
        first = sequence.first[g]
        for page in range(max(sequence.indexed, first), min(full, first + len(table))):
            state.pool.index(table[page - first], g, sequence.digests[page])
    sequence.indexed = max(full, sequence.indexed)
    sequence.next_index = (sequence.indexed + 1) * state.page_size - sequence.num_prompt
