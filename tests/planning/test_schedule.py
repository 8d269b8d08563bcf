"""Decisions about running sequences, one small case each."""

import pickle
from dataclasses import replace

import pytest

from tcb.planning.packing import pack_batch
from tcb.planning.schedule import plan_batch
from tcb.planning.state import apply_cancel, apply_plan
from tests.planning.small_cases import arrive, land, launch, make_state, only, spans, turn


def test_nothing_to_do_is_an_empty_plan():
    state, limits = make_state()
    plan = plan_batch(state, limits)
    assert plan.is_empty and plan.num_tokens == 0 and plan.sample_seq_ids == ()


def test_a_prompt_is_cut_into_chunks_of_the_budget():
    state, limits = make_state(max_batch_tokens=6)
    arrive(state, "A", 14)
    plans = [turn(state, limits) for _ in range(3)]
    assert [spans(plan) for plan in plans] == [[(0, 0, 6)], [(0, 6, 6)], [(0, 12, 2)]]
    assert [plan.sample_seq_ids for plan in plans] == [(), (), (0,)]


def test_a_chunk_gets_a_block_for_every_page_it_enters():
    state, limits = make_state(max_batch_tokens=6)
    arrive(state, "A", 14)
    first, second = turn(state, limits), turn(state, limits)
    assert only(first).fresh == ((0, 1),) and only(second).fresh == ((2,),)
    assert only(second).first == (2,)


def test_decodes_come_before_prompts_under_fifo():
    state, limits = make_state(max_batch_tokens=6)
    arrive(state, "A", 5)
    turn(state, limits)
    arrive(state, "B", 20)
    plan = turn(state, limits)
    assert plan.decodes == (0,) and spans(plan) == [(1, 0, 5)]
    plan = turn(state, limits)
    assert plan.decodes == (0,) and spans(plan) == [(1, 5, 5)]


def test_prompts_that_run_come_before_decodes_under_prefill_first():
    state, limits = make_state(max_batch_tokens=6, policy="prefill_first")
    arrive(state, "A", 5)
    turn(state, limits)
    arrive(state, "B", 20)
    assert spans(turn(state, limits)) == [(1, 0, 5)]
    plan = turn(state, limits)
    assert plan.decodes == () and spans(plan) == [(1, 5, 6)]


def test_no_more_sequences_than_rows():
    state, limits = make_state(max_requests=2)
    for name in "ABC":
        arrive(state, name, 2)
    assert spans(turn(state, limits)) == [(0, 0, 2), (1, 0, 2)]
    plan = turn(state, limits)
    assert plan.decodes == (0, 1) and plan.chunks == ()


def test_a_sequence_decodes_where_it_has_room_and_gets_a_page_where_not():
    state, limits = make_state()
    arrive(state, "A", 3)
    turn(state, limits)
    assert turn(state, limits).decodes == (0,)
    assert spans(turn(state, limits)) == [(0, 4, 1)]
    assert turn(state, limits).decodes == (0,)


def test_at_depth_1_the_token_in_flight_is_decoded_from():
    state, limits = make_state(depth=1)
    arrive(state, "A", 2, max_new_tokens=3)
    first = launch(state, limits)
    second = launch(state, limits)
    assert second.decodes == (0,) and state.running[0].in_flight == 2
    land(state, first)
    third = launch(state, limits)
    assert third.decodes == (0,)
    # three tokens are sampled: nothing is left to launch until they land
    assert plan_batch(state, limits).is_empty
    land(state, second)
    assert [s.seq_id for s in land(state, third).finished] == [0]


def test_below_the_safety_margin_prompts_wait_while_others_run():
    state, limits = make_state(num_blocks=10, safety_margin=0.5, max_batch_tokens=64)
    arrive(state, "A", 22)
    turn(state, limits)
    arrive(state, "B", 4)
    plan = turn(state, limits)
    assert plan.decodes == (0,) and plan.chunks == ()
    apply_cancel(state, "A")
    assert spans(turn(state, limits)) == [(1, 0, 4)]


def decode_to_the_third_page(**changes):
    """A sequence with a window of 4 that has decoded up to position 8, where page 0 is not seen."""
    state, limits = make_state((4,), **changes)
    arrive(state, "A", 3, max_new_tokens=9)
    turn(state, limits, 6)
    assert state.running[0].computed == 8
    return state, limits, list(state.running[0].tables[0])


def test_a_page_that_left_the_window_is_recycled_in_place():
    state, limits, (first, second) = decode_to_the_third_page(share_prefixes=False)
    assert only(turn(state, limits)).fresh == ((first,),)
    assert state.running[0].tables == [[second, first]]


def test_an_indexed_page_that_left_the_window_is_not_overwritten_while_others_are_free():
    state, limits, (first, second) = decode_to_the_third_page()
    [[third]] = only(turn(state, limits)).fresh
    assert third not in (first, second) and first in state.pool.idle


def test_an_indexed_page_that_left_the_window_is_overwritten_when_no_other_is_there():
    state, limits, (first, _) = decode_to_the_third_page(num_blocks=2)
    assert only(turn(state, limits)).fresh == ((first,),)


class TestPreemption:
    """Three sequences of four tokens, a page each, in a pool without a fourth."""

    @pytest.fixture
    def pressed(self):
        def build(**changes):
            state, limits = make_state(num_blocks=3, max_length=12, **changes)
            for name in "ABC":
                arrive(state, name, 4)
            plan = turn(state, limits)
            assert len(plan.chunks) == 3
            return state, limits

        return build

    def test_the_newest_is_preempted_first_and_the_oldest_goes_on(self, pressed):
        state, limits = pressed()
        plan = turn(state, limits)
        assert [(preemption.seq_id, preemption.kind) for preemption in plan.preemptions] == [
            (2, "recompute")
        ]
        assert spans(plan) == [(0, 4, 1)]
        assert list(state.running) == [0, 1] and list(state.waiting) == [2]

    def test_nobody_is_let_in_while_others_are_preempted(self, pressed):
        state, limits = pressed()
        arrive(state, "D", 1)
        plan = turn(state, limits)
        assert plan.preemptions and spans(plan) == [(0, 4, 1)]

    def test_who_was_preempted_comes_back_first(self, pressed):
        state, limits = pressed()
        arrive(state, "D", 1)
        turn(state, limits)
        assert list(state.waiting) == [2, 3]

    def test_who_is_computed_again_starts_over_and_keeps_its_tokens(self, pressed):
        state, limits = pressed()
        turn(state, limits)
        sequence = state.waiting[2]
        assert (sequence.computed, sequence.num_known, sequence.tables) == (0, 5, [[]])

    def test_with_host_slots_content_is_kept(self, pressed):
        state, limits = pressed(host_blocks=1)
        block = state.running[2].tables[0][0]
        plan = turn(state, limits)
        [preemption] = plan.preemptions
        assert preemption.kind == "offload" and preemption.offload == (((block, 0),),)
        sequence = state.waiting[2]
        assert (sequence.computed, sequence.host, state.free_host) == (4, [[0]], [])

    def test_with_too_few_host_slots_it_is_computed_again(self):
        state, limits = make_state((None, None), num_blocks=6, max_length=12, host_blocks=1)
        for name in "ABC":
            arrive(state, name, 4)
        turn(state, limits)
        assert [preemption.kind for preemption in turn(state, limits).preemptions] == ["recompute"]

    def test_a_page_behind_the_window_is_not_offloaded(self):
        # at position 4 nobody sees page 0 of a window of 1: one block a sequence is worth keeping
        state, limits = make_state((None, 1), num_blocks=6, max_length=12, host_blocks=9)
        for name in "ABC":
            arrive(state, name, 3)
        turn(state, limits, 2)
        assert [len(table) for table in state.running[2].tables] == [1, 1]
        [[block], _] = state.running[2].tables
        plan = turn(state, limits)
        assert plan.preemptions[0].offload == (((block, 0),), ())
        assert state.waiting[2].host == [[0], []]

    def test_the_next_batch_gives_the_older_its_page(self, pressed):
        state, limits = pressed()
        turn(state, limits)
        # no block is left: the older of two goes on, the newer waits with what it has
        plan = turn(state, limits)
        assert plan.decodes == (0,)


def test_nothing_is_written_and_equal_states_give_equal_plans():
    state, limits = make_state((None, 6), max_batch_tokens=12, num_blocks=30)
    for name, length in zip("ABCDE", (3, 9, 14, 4, 8), strict=True):
        arrive(state, name, length)
    for _ in range(12):
        before = pickle.dumps(state)
        plan = plan_batch(state, limits)
        batch = pack_batch(state, plan)
        assert pickle.dumps(state) == before
        twin = pickle.loads(before)
        assert plan_batch(twin, limits) == plan and pack_batch(twin, plan) == batch
        turn(state, limits)


class Watched(list):
    """A list that counts how many of its elements are looked at."""

    looks = 0

    def __getitem__(self, index):
        got = super().__getitem__(index)
        Watched.looks += len(got) if isinstance(index, slice) else 1
        return got

    def __iter__(self):
        Watched.looks += len(self)
        return super().__iter__()


def watch(sequence):
    """Count the looks at all of a sequence that its context makes long."""
    sequence.request = replace(sequence.request, prompt=Watched(sequence.request.prompt))
    sequence.generated = Watched(sequence.generated)
    sequence.block_hashes = Watched(sequence.block_hashes)
    sequence.tables = [Watched(table) for table in sequence.tables]
    Watched.looks = 0


@pytest.mark.parametrize("windows", [(None,), (8,), (None, 8)], ids=str)
def test_a_decode_step_looks_at_no_more_of_a_long_context_than_of_a_short_one(windows):
    looks = []
    for length in (100, 4000):
        state, limits = make_state(windows, max_batch_tokens=8000, num_blocks=5000, max_length=5000)
        arrive(state, "A", length, max_new_tokens=40)
        turn(state, limits)
        watch(state.running[0])
        for _ in range(24):
            plan = plan_batch(state, limits)
            pack_batch(state, plan)
            apply_plan(state, plan)
            land(state, plan)
        looks.append(Watched.looks)
    assert looks[0] == looks[1] < 24 * 10


@pytest.mark.parametrize("windows", [(None,), (None, 8)], ids=str)
def test_a_prompt_that_waits_for_blocks_is_not_scanned_in_every_step(windows):
    for length in (400, 4000):
        state, limits = make_state(
            windows,
            max_batch_tokens=8000,
            num_blocks=len(windows) * length // 4 + 8,
            max_length=15000,
        )
        running = arrive(state, "A", length, max_new_tokens=40)
        turn(state, limits)
        waiting = arrive(state, "B", (*running.request.prompt, *range(2 * length)))
        watch(waiting)
        plan = plan_batch(state, limits)
        pack_batch(state, plan)
        assert spans(plan) == [(0, length, 1)]
        # a binary search or two in each group
        assert 0 < Watched.looks < 70
