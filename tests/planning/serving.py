"""Serves a workload on the toy device, step by step, and checks what must hold after every step.

It knows nothing of how workloads are drawn (`workloads`) or of what a test is about.
"""

import pickle
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import chain

from tcb.planning.groups import LayerGroup, first_visible_page
from tcb.planning.limits import Limits
from tcb.planning.packing import PackedBatch, pack_batch
from tcb.planning.plan import BatchPlan
from tcb.planning.request import Request
from tcb.planning.schedule import plan_batch
from tcb.planning.state import (
    NO_ROW,
    SampledTokens,
    Sequence,
    apply_arrival,
    apply_cancel,
    apply_new_weights,
    apply_plan,
    apply_results,
    new_state,
)
from tests.planning.pool_check import check_pool
from tests.planning.toy import EOS, ToyDevice, ToyModel, alone


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to come: at `step` or later, once nobody of its id lives and `after` has ended.

    The prompt is behind all tokens of `after`; a fork has its parent's prompt instead.
    `fails_at`: the sample of this number (from 0) goes wrong.
    """

    step: int
    id: str
    prompt: tuple[int, ...] = ()
    max_new_tokens: int = 1
    stops: bool = False
    parent: str | None = None
    after: str | None = None
    fails_at: int | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Who asks for what and when, and the limits within which it is served.

    cancels are (step, id) pairs; from the steps in new_weights on, the model has other weights.
    """

    groups: tuple[LayerGroup, ...]
    limits: Limits
    arrivals: tuple[Arrival, ...]
    cancels: tuple[tuple[int, str], ...] = ()
    new_weights: tuple[int, ...] = ()


@dataclass(slots=True)
class Record:
    """What became of one request."""

    arrival: Arrival
    request: Request
    sequence: Sequence
    weights: int
    # (tokens known, weights from then on)
    changes: list[tuple[int, int]] = field(default_factory=list)
    end: str | None = None


class Server:
    """The engine's loop over the toy device, with a referee in it."""

    def __init__(self, workload: Workload, pure: bool = True):
        limits = workload.limits
        self.workload, self.limits, self.pure = workload, limits, pure
        self.state = new_state(workload.groups, limits)
        self.device = ToyDevice(
            workload.groups,
            limits.page_size,
            limits.num_blocks,
            limits.max_requests,
            self.state.columns,
            limits.host_blocks,
        )
        self.arrivals = list(workload.arrivals)
        self.cancels = sorted(workload.cancels)
        self.new_weights = sorted(workload.new_weights)
        self.weights = 0
        self.flying: deque[tuple[BatchPlan, list[int]]] = deque()
        self.records: list[Record] = []
        self.live: dict[str, Record] = {}
        self.step = 0
        self.counts: Counter[str] = Counter()
        self.plans: list[BatchPlan] = []

    def run(self) -> "Server":
        """Serve everybody to the end and compare all tokens with those of a request alone."""
        while self.arrivals or self.live or self.flying:
            self.advance()
        self._check_nothing_held()
        for record in self.records:
            self._check_tokens(record)
        return self

    def advance(self) -> BatchPlan:
        """One turn of the engine's loop."""
        self._meet()
        plan = self._plan()
        busy = not plan.is_empty
        assert busy or self.flying or not self.live, f"stuck at step {self.step}"
        assert busy or not plan.preemptions, "somebody is preempted for nothing"
        if busy:
            self._launch(plan)
        while self.flying and (len(self.flying) > self.limits.depth or not busy):
            self._land()
        self.step += 1
        self.counts["steps"] += 1
        return plan

    def _meet(self):
        """Whoever comes, leaves or changes the weights between two batches."""
        if not self.live and not self.flying and self.arrivals:
            self.step = max(self.step, min(arrival.step for arrival in self.arrivals))
        if self.new_weights and self.new_weights[0] <= self.step:
            self._change_weights()
        for arrival in list(self.arrivals):
            if self._may_arrive(arrival):
                self.arrivals.remove(arrival)
                self._arrive(arrival)
        while self.cancels and self.cancels[0][0] <= self.step:
            self._cancel(self.cancels.pop(0)[1])

    def _may_arrive(self, arrival):
        if arrival.step > self.step or arrival.id in self.live:
            return False
        if arrival.after is not None:
            return arrival.after not in self.live and self._last(arrival.after) is not None
        return arrival.parent is None or self._last(arrival.parent) is not None

    def _last(self, request_id):
        records = (r for r in reversed(self.records) if r.request.id == request_id)
        return next(records, None)

    def _arrive(self, arrival):
        prompt = arrival.prompt
        if arrival.parent is not None:
            prompt = self._last(arrival.parent).request.prompt
        elif arrival.after is not None:
            room = self.limits.max_length - arrival.max_new_tokens - len(prompt)
            prompt = (*self._last(arrival.after).sequence.known(0, room), *prompt)
        request = Request(
            id=arrival.id,
            prompt=prompt,
            max_new_tokens=min(arrival.max_new_tokens, self.limits.max_length - len(prompt)),
            eos=EOS if arrival.stops else frozenset(),
            parent=arrival.parent,
        )
        sequence = apply_arrival(self.state, request)
        record = Record(arrival, request, sequence, self.weights)
        self.records.append(record)
        self.live[request.id] = record

    def _cancel(self, request_id):
        ended = apply_cancel(self.state, request_id)
        assert bool(ended) == (request_id in self.live)
        for sequence in ended:
            self.live.pop(sequence.request.id).end = "cancelled"
        self.counts["cancelled"] += len(ended)
        self._check_state()

    def _change_weights(self):
        while self.flying:
            self._land()
        self.new_weights.pop(0)
        self.weights += 1
        apply_new_weights(self.state)
        self.device.model = ToyModel(self.workload.groups, self.weights)
        for record in self.live.values():
            record.changes.append((record.sequence.num_known, self.weights))
        self.counts["new weights"] += 1
        self._check_state()

    def _plan(self):
        state, limits = self.state, self.limits
        if not self.pure:
            return plan_batch(state, limits)
        before = pickle.dumps(state)
        plan = plan_batch(state, limits)
        batch = pack_batch(state, plan)
        assert pickle.dumps(state) == before, "planning or packing wrote to the state"
        assert plan_batch(state, limits) == plan, "planning is not deterministic"
        twin = pickle.loads(before)
        assert plan_batch(twin, limits) == plan, "equal states give different plans"
        assert pack_batch(twin, plan) == batch, "equal states are packed differently"
        return plan

    def _launch(self, plan):
        state, pool = self.state, self.state.pool
        self._check_budgets(plan)
        self._count(plan)
        batch = pack_batch(state, plan)
        fresh = set(chain.from_iterable(blocks for c in plan.chunks for blocks in c.fresh))
        fixed = set(pool.hash_of) - fresh
        apply_plan(state, plan)
        tokens = self.device.launch(batch)
        self._check_state()
        self._check_written(batch, fixed)
        self.flying.append((plan, tokens))
        self.plans.append(plan)

    def _land(self):
        plan, tokens = self.flying.popleft()
        tokens = [
            -1 if self._fails(seq_id) else token
            for seq_id, token in zip(plan.sample_seq_ids, tokens, strict=True)
        ]
        for sequence in apply_results(self.state, plan, SampledTokens(tokens)).finished:
            record = self.live.pop(sequence.request.id)
            record.end = "finished" if sequence.error is None else "failed"
            self.counts[record.end] += 1

    def _fails(self, seq_id):
        sequence = self.state.find(seq_id)
        if sequence is None:
            return False
        return len(sequence.generated) == self.live[sequence.request.id].arrival.fails_at

    def _count(self, plan):
        state, counts = self.state, self.counts
        for chunk in plan.chunks:
            sequence = state.find(chunk.seq_id)
            counts["chunked"] += not chunk.samples
            counts["hit pages"] += max(map(len, chunk.shared))
            counts["restored"] += bool(chunk.restore)
            counts["forks"] += bool(sequence.row == NO_ROW and sequence.parent and chunk.start)
            counts["copies"] += len(chunk.copies)
        for preemption in plan.preemptions:
            counts[preemption.kind] += 1
        counts["left"] += sum(len(s.first) and max(s.first) > 0 for s in state.running.values())

    def _check_budgets(self, plan):
        seq_ids = [*plan.decodes, *(chunk.seq_id for chunk in plan.chunks)]
        preempted = [preemption.seq_id for preemption in plan.preemptions]
        assert len({*seq_ids, *preempted}) == len(seq_ids) + len(preempted), (
            "an id is planned twice"
        )
        assert plan.num_tokens <= self.limits.max_batch_tokens
        assert len(seq_ids) <= self.limits.max_requests
        running = self.state.running
        assert min(running, default=-1) not in preempted, "the oldest is preempted"
        assert preempted == sorted(preempted, reverse=True), "not the newest first"
        # the newest first, but for those that are in the batch themselves
        assert all(
            k in seq_ids or k in preempted for k in running if preempted and k > preempted[-1]
        )

    def _check_written(self, batch: PackedBatch, fixed: set[int]):
        """What a launch wrote is read by its writer alone and was not to be found before."""
        written = self.device.written
        assert not fixed & written.keys(), "wrote a block that is registered"
        for sequence in self.state.running.values():
            for block in chain.from_iterable(sequence.tables):
                assert written.get(block, sequence.row) == sequence.row, "wrote a block of others"

    def _check_state(self):
        state, pool = self.state, self.state.pool
        check_pool(pool)
        readers = [0] * len(pool.readers)
        for sequence in chain(state.running.values(), state.waiting.values()):
            self._check_sequence(sequence)
            for block in chain.from_iterable(sequence.tables):
                readers[block] += 1
        assert readers == pool.readers, "readers are not those of the tables"
        assert not state.running.keys() & state.waiting.keys()
        assert sorted(state.seq_ids.values()) == sorted([*state.running, *state.waiting])
        rows = [sequence.row for sequence in state.running.values()]
        assert sorted(rows + state.free_rows) == list(range(self.limits.max_requests))
        hosted = [slot for s in state.waiting.values() for slots in s.host or () for slot in slots]
        assert sorted(hosted + state.free_host) == list(range(self.limits.host_blocks))

    def _check_sequence(self, sequence):
        """A sequence holds the pages that its next query may read, and few others."""
        page_size, computed = self.limits.page_size, sequence.computed
        assert 0 <= sequence.in_flight <= self.limits.depth + 1
        longest = sequence.num_prompt + sequence.limit
        assert computed < longest and sequence.length <= longest
        if sequence.row == NO_ROW:
            assert not any(sequence.tables), "a waiting sequence holds blocks"
            return
        assert not sequence.host
        end_page = -(-computed // page_size)
        assert sequence.room == end_page * page_size
        for g, group in enumerate(self.workload.groups):
            first, table = sequence.first[g], sequence.tables[g]
            assert first + len(table) == end_page, "groups end at different pages"
            visible = first_visible_page(computed, group.window, page_size)
            assert first <= visible, "a page that is still read is gone"
            if group.window is not None:
                # pages leave when a new one is needed: the last query was up to a page before
                most = (group.window - 1 + page_size - 2) // page_size + 2
                assert len(table) <= most, "pages behind the window are held"

    def _check_nothing_held(self):
        state = self.state
        assert not (state.running or state.waiting or state.seq_ids)
        assert not any(state.pool.readers)
        assert state.pool.available == self.limits.num_blocks

    def _check_tokens(self, record):
        expected = alone(self.workload.groups, record.request, record.weights, record.changes)
        got, arrival = record.sequence.known(), record.arrival
        if record.end == "failed":
            assert len(record.sequence.generated) == arrival.fails_at
        where = f"{record.request.id} ({record.end})"
        assert got == expected[: len(got)], f"{where}: tokens are not those of the request alone"
        assert record.end != "finished" or got == expected, f"{where} ended too early"
