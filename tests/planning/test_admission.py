"""Decisions about who is let in from the queue, one small case each."""

import pytest

from tcb.planning.schedule import plan_batch
from tcb.planning.state import apply_cancel
from tests.planning.small_cases import arrive, land, launch, make_state, only, spans, turn

PROMPT = tuple(range(100, 118))


def served(windows=(None,), length=18, **changes):
    """A state in which a prompt of `length` tokens has been served and has left its pages."""
    state, limits = make_state(windows, max_batch_tokens=64, **changes)
    arrive(state, "A", PROMPT[:length], max_new_tokens=1)
    turn(state, limits)
    assert not state.running and not state.waiting
    return state, limits


@pytest.mark.parametrize("windows", [(None,), (5,), (None, 5)], ids=str)
def test_a_prompt_starts_behind_the_pages_that_the_cache_holds(windows):
    state, limits = served(windows)
    arrive(state, "B", PROMPT)
    chunk = only(plan_batch(state, limits))
    assert (chunk.start, chunk.count) == (16, 2)
    # a query at position 16 sees 12 and later through a window of 5
    assert [len(blocks) for blocks in chunk.shared] == [4 if w is None else 1 for w in windows]


@pytest.mark.parametrize(("length", "start"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (16, 12)])
def test_at_least_one_token_is_computed(length, start):
    state, limits = served()
    arrive(state, "B", PROMPT[:length])
    chunk = only(plan_batch(state, limits))
    assert (chunk.start, chunk.end) == (start, length)


def test_a_hit_ends_where_the_prompts_part():
    state, limits = served()
    arrive(state, "B", (*PROMPT[:9], 7, *PROMPT[10:]))
    assert only(plan_batch(state, limits)).start == 8


def test_the_same_page_at_another_depth_is_no_hit():
    state, limits = served()
    arrive(state, "B", PROMPT[4:])
    assert only(plan_batch(state, limits)).start == 0


def test_without_sharing_there_is_no_hit():
    state, limits = served(share_prefixes=False)
    arrive(state, "B", PROMPT)
    assert only(plan_batch(state, limits)).start == 0


def forget(state, group, page):
    """Take the idle block of this page of the first prompt away, as others do when they need it."""
    block = state.pool.block_of[group][arrive(state, "X", PROMPT).block_hashes[page]]
    apply_cancel(state, "X")
    state.pool.take(block)
    state.pool.drop(block)


@pytest.mark.parametrize("page", [0, 1, 2, 3])
def test_a_full_group_needs_every_page(page):
    state, limits = served()
    forget(state, 0, page)
    arrive(state, "B", PROMPT)
    chunk = only(plan_batch(state, limits))
    assert chunk.start == 4 * page and None not in chunk.shared[0]


@pytest.mark.parametrize(("page", "start"), [(0, 16), (1, 16), (2, 16), (3, 12)])
def test_a_sliding_group_needs_its_window_only(page, start):
    state, limits = served((5,))
    forget(state, 0, page)
    arrive(state, "B", PROMPT)
    assert only(plan_batch(state, limits)).start == start


def test_a_prefix_counts_when_all_groups_hold_it():
    state, limits = served((None, 5))
    forget(state, 1, 3)
    arrive(state, "B", PROMPT)
    # 16 tokens would need page 3 of the sliding group, 12 need its page 2
    chunk = only(plan_batch(state, limits))
    assert chunk.start == 12 and [len(blocks) for blocks in chunk.shared] == [3, 1]


def test_what_a_running_sequence_reads_is_shared():
    state, limits = make_state(max_batch_tokens=64)
    first = arrive(state, "A", PROMPT)
    turn(state, limits)
    arrive(state, "B", PROMPT)
    turn(state, limits)
    shared = first.tables[0][:4]
    assert state.running[1].tables[0][:4] == shared
    assert [state.pool.readers[block] for block in shared] == [2] * 4


def test_an_identical_prompt_waits_for_the_one_that_is_computed():
    state, limits = make_state(max_batch_tokens=8)
    for name in "AB":
        arrive(state, name, PROMPT)
    arrive(state, "C", 3)
    assert spans(turn(state, limits)) == [(0, 0, 8)]
    assert spans(turn(state, limits)) == [(0, 8, 8)]
    # B has four pages to read now: its last two tokens are left; C comes behind it
    assert spans(turn(state, limits)) == [(0, 16, 2), (1, 16, 2), (2, 0, 3)]


def test_those_behind_an_identical_prompt_do_not_wait_with_it():
    state, limits = make_state(max_batch_tokens=32)
    for name in "AB":
        arrive(state, name, PROMPT)
    arrive(state, "C", 3)
    assert spans(turn(state, limits)) == [(0, 0, 18), (2, 0, 3)]


def test_the_queue_is_served_in_order():
    state, limits = make_state(num_blocks=6, max_batch_tokens=64)
    arrive(state, "A", 12)
    turn(state, limits)
    arrive(state, "B", 16)
    arrive(state, "C", 2)
    # C would fit, but B came first
    assert spans(turn(state, limits)) == [(0, 12, 1)]


def test_a_prompt_needs_blocks_for_all_of_it_while_others_run():
    state, limits = make_state(num_blocks=8, max_batch_tokens=8)
    arrive(state, "A", 4)
    turn(state, limits)
    arrive(state, "B", 28)
    plan = turn(state, limits)
    assert spans(plan) == [(0, 4, 1)]
    apply_cancel(state, "A")
    assert spans(turn(state, limits)) == [(1, 0, 8)]


def test_blocks_that_prompts_under_way_still_need_are_not_given_to_the_queue():
    state, limits = make_state(num_blocks=8, max_batch_tokens=16)
    arrive(state, "A", 28)
    turn(state, limits)
    arrive(state, "B", 8)
    # A takes three of four blocks left in this batch
    assert spans(turn(state, limits)) == [(0, 16, 12)]


class TestForks:
    @pytest.fixture
    def family(self):
        def build(length, num_forks=2, windows=(None,), **changes):
            state, limits = make_state(windows, max_batch_tokens=32, **changes)
            prompt = tuple(range(length))
            arrive(state, "A", prompt)
            for i in range(num_forks):
                arrive(state, f"A{i}", prompt, parent="A")
            return state, limits

        return build

    def test_a_parent_pauses_before_the_last_token_of_its_prompt(self, family):
        state, limits = family(10)
        plan = turn(state, limits)
        assert spans(plan) == [(0, 0, 9)] and plan.sample_seq_ids == ()

    def test_forks_copy_the_page_that_is_being_filled_and_share_the_others(self, family):
        state, limits = family(10)
        turn(state, limits)
        [table] = state.running[0].tables
        plan = launch(state, limits)
        assert plan.decodes == (0,) and spans(plan) == [(1, 9, 1), (2, 9, 1)]
        for chunk in plan.chunks:
            assert chunk.shared == (tuple(table[:2]),)
            assert chunk.copies == ((table[2], chunk.fresh[0][0]),)
        assert plan.sample_seq_ids == (0, 1, 2)

    def test_at_the_border_of_a_page_nothing_is_copied(self, family):
        state, limits = family(9)
        turn(state, limits)
        plan = turn(state, limits)
        assert spans(plan) == [(0, 8, 1), (1, 8, 1), (2, 8, 1)]
        assert all(chunk.copies == () for chunk in plan.chunks)

    def test_of_a_sliding_group_forks_share_the_window_only(self, family):
        state, limits = family(10, 1, (None, 3))
        turn(state, limits)
        [fork] = turn(state, limits).chunks
        # a query at 9 sees 7 and later
        assert fork.first == (0, 1) and [len(blocks) for blocks in fork.shared] == [2, 1]
        assert len(fork.copies) == 2

    def test_forks_of_a_prompt_of_one_token_share_nothing(self, family):
        state, limits = family(1)
        assert spans(turn(state, limits)) == [(0, 0, 1), (1, 0, 1), (2, 0, 1)]

    def test_forks_for_which_there_is_no_row_read_the_prompt_from_the_cache(self, family):
        state, limits = family(10, 2, max_requests=2)
        turn(state, limits)
        assert spans(turn(state, limits)) == [(1, 9, 1)]
        while 2 in state.waiting:
            plan = turn(state, limits)
        # the page that was being filled is lost to it
        assert spans(plan)[-1] == (2, 8, 2)

    def test_a_fork_that_comes_late_reads_the_prompt_from_the_cache(self, family):
        state, limits = family(10, 0)
        turn(state, limits)
        arrive(state, "A0", range(10), parent="A")
        assert spans(turn(state, limits)) == [(1, 8, 2)]

    def test_a_fork_whose_parent_has_ended_reads_the_prompt_from_the_cache(self, family):
        state, limits = family(10, 0)
        turn(state, limits)
        apply_cancel(state, "A")
        arrive(state, "A0", range(10), parent="A")
        assert spans(turn(state, limits)) == [(1, 8, 2)]


class TestBackFromPreemption:
    @pytest.fixture
    def preempted(self):
        def build(**changes):
            state, limits = make_state(num_blocks=3, max_length=12, **changes)
            for name in "ABC":
                arrive(state, name, 4, max_new_tokens=3)
            turn(state, limits, 2)
            assert list(state.waiting) == [2]
            return state, limits

        return build

    def test_it_comes_back_when_the_others_have_a_page_each_to_grow_into(self, preempted):
        state, limits = preempted()
        while 2 in state.waiting:
            others, available = len(state.running), state.pool.available
            plan = turn(state, limits)
        assert plan.chunks[-1].seq_id == 2 and available >= others + 2

    def test_from_the_host_it_goes_on_where_it_was(self, preempted):
        state, limits = preempted(host_blocks=5)
        assert state.waiting[2].host == [[0]] and state.waiting[2].computed == 4
        while 2 in state.waiting:
            plan = launch(state, limits)
            if not plan.chunks or plan.chunks[-1].seq_id != 2:
                land(state, plan)
        chunk = plan.chunks[-1]
        assert (chunk.start, chunk.count) == (4, 1) and len(chunk.fresh[0]) == 2
        assert chunk.restore == ((0, chunk.fresh[0][0]),)
        assert sorted(state.free_host) == [0, 1, 2, 3, 4]

    def test_without_a_host_copy_it_is_computed_again_behind_what_is_left_in_the_cache(
        self, preempted
    ):
        state, limits = preempted(share_prefixes=False)
        while 2 in state.waiting:
            plan = turn(state, limits)
        chunk = plan.chunks[-1]
        # four tokens of the prompt and one that it had sampled
        assert (chunk.start, chunk.count, chunk.samples) == (0, 5, True)
