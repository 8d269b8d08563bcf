"""What the writers of the state do, one small case each."""

import pytest

from tcb.planning.plan import SampledTokens
from tcb.planning.schedule import plan_batch
from tcb.planning.state import (
    NO_ROW,
    apply_cancel,
    apply_new_weights,
    apply_plan,
    apply_results,
    pages_past,
)
from tests.planning.pool_check import check_pool
from tests.planning.small_cases import TOKEN, arrive, land, launch, make_state, spans, turn

PROMPT = tuple(range(100, 110))


def held(state):
    return sum(readers > 0 for readers in state.pool.readers)


def test_an_arrival_waits_and_holds_nothing():
    state, _ = make_state((None, 3))
    sequence = arrive(state, "A", 9)
    assert list(state.waiting) == [0] and state.seq_ids == {"A": 0} and held(state) == 0
    assert (sequence.length, sequence.computed, sequence.row, len(sequence.block_hashes)) == (
        9,
        0,
        NO_ROW,
        2,
    )


def test_two_of_one_id_cannot_live_together():
    state, _ = make_state()
    arrive(state, "A", 2)
    with pytest.raises(AssertionError, match="'A' is live already"):
        arrive(state, "A", 3)


def test_without_sharing_no_page_is_hashed():
    state, limits = make_state(share_prefixes=False)
    sequence = arrive(state, "A", 9)
    turn(state, limits, 6)
    assert sequence.block_hashes == [] and state.pool.hash_of == {}


def test_progress_counts_what_is_launched_and_tokens_what_has_landed():
    state, limits = make_state(depth=1)
    sequence = arrive(state, "A", 2)
    first = launch(state, limits)
    assert (sequence.computed, sequence.in_flight, sequence.length) == (2, 1, 3)
    second = launch(state, limits)
    assert (sequence.computed, sequence.in_flight, sequence.length) == (3, 2, 4)
    land(state, first)
    assert (sequence.computed, sequence.in_flight, sequence.generated) == (3, 1, [TOKEN])
    land(state, second)
    assert (sequence.computed, sequence.in_flight, sequence.length) == (3, 0, 4)


def test_a_sequence_ends_at_its_length():
    state, limits = make_state()
    arrive(state, "A", 2, max_new_tokens=2)
    assert land(state, launch(state, limits)).finished == ()
    [sequence] = land(state, launch(state, limits)).finished
    assert sequence.generated == [TOKEN, TOKEN] and sequence.error is None
    assert (held(state), state.seq_ids, len(state.free_rows)) == (0, {}, 8)


def test_a_sequence_ends_at_an_end_token():
    state, limits = make_state()
    arrive(state, "A", 2, eos=frozenset({7, TOKEN}))
    [sequence] = land(state, launch(state, limits)).finished
    assert sequence.generated == [TOKEN]


def test_what_was_launched_behind_an_end_token_is_dropped():
    state, limits = make_state(depth=1)
    sequence = arrive(state, "A", 2, eos=frozenset({TOKEN}))
    first, second = launch(state, limits), launch(state, limits)
    assert land(state, first).finished == (sequence,)
    assert land(state, second).finished == () and sequence.generated == [TOKEN]


def test_a_negative_token_is_a_failure_of_one():
    state, limits = make_state()
    for name in "ABC":
        arrive(state, name, 2)
    plan = launch(state, limits)
    results = SampledTokens([-1, TOKEN, -1], errors={2: "a reason"})
    landed = apply_results(state, plan, results)
    assert [s.error for s in landed.finished] == [
        "the model's logits are not finite",
        "a reason",
    ]
    assert list(state.running) == [1] and landed.finished[0].generated == []


def test_only_streaming_sequences_are_reported_before_their_end():
    state, limits = make_state()
    arrive(state, "A", 2)
    arrive(state, "B", 2, streaming=True, max_new_tokens=2)
    assert [s.seq_id for s in land(state, launch(state, limits)).streamed] == [1]
    landed = land(state, launch(state, limits))
    assert landed.streamed == () and [s.seq_id for s in landed.finished] == [1]


def test_logprobs_and_timestamps_are_kept_where_they_are_wanted():
    state, limits = make_state()
    first = arrive(state, "A", 2, record_timestamps=True)
    second = arrive(state, "B", 2)
    for now in (1.5, 2.5):
        plan = launch(state, limits)
        apply_results(state, plan, SampledTokens([TOKEN] * 2, logprobs=[-0.5, -now]), now)
    assert (first.logprobs, second.logprobs) == ([-0.5, -0.5], [-1.5, -2.5])
    assert (first.timestamps, second.timestamps) == ([1.5, 2.5], [])


def test_a_full_page_is_found_as_soon_as_it_is_launched():
    state, limits = make_state(max_batch_tokens=6)
    sequence = arrive(state, "A", PROMPT)
    launch(state, limits)
    assert state.pool.find(0, sequence.block_hashes[0]) == sequence.tables[0][0]
    assert state.pool.find(0, sequence.block_hashes[1]) is None


def test_generated_pages_are_found_when_their_tokens_are_known():
    state, limits = make_state()
    sequence = arrive(state, "A", PROMPT[:6])
    turn(state, limits, 2)
    assert len(sequence.block_hashes) == 1
    turn(state, limits)
    assert len(sequence.block_hashes) == 2
    assert state.pool.find(0, sequence.block_hashes[1]) == sequence.tables[0][1]


def test_the_deepest_page_is_the_first_to_be_forgotten():
    state, limits = make_state()
    sequence = arrive(state, "A", PROMPT, max_new_tokens=1)
    launch(state, limits)
    pages = list(sequence.tables[0])
    apply_cancel(state, "A")
    assert list(state.pool.idle) == [pages[1], pages[0]] and state.pool.free[-1] == pages[2]


def test_cancelling_gives_everything_back():
    state, limits = make_state((None, 3), depth=1)
    arrive(state, "A", PROMPT)
    plan = launch(state, limits)
    assert [s.request.id for s in apply_cancel(state, "A")] == ["A"]
    assert (held(state), state.seq_ids, len(state.free_rows)) == (0, {}, 8)
    assert land(state, plan).finished == ()
    check_pool(state.pool)


def test_cancelling_who_waits_in_host_memory_gives_its_slots_back():
    state, limits = make_state(num_blocks=3, max_length=12, host_blocks=2)
    for name in "ABC":
        arrive(state, name, 4)
    turn(state, limits, 2)
    assert state.free_host == [1]
    apply_cancel(state, "C")
    assert sorted(state.free_host) == [0, 1]


def test_cancelling_nobody_is_nothing():
    state, _ = make_state()
    assert apply_cancel(state, "A") == []


def test_cancelling_a_fork_lets_its_parent_go_on():
    state, limits = make_state()
    arrive(state, "A", PROMPT)
    arrive(state, "B", PROMPT, parent="A")
    apply_cancel(state, "B")
    assert state.waiting[0].unforked == 0
    assert spans(turn(state, limits)) == [(0, 0, 10)]


def test_a_fork_has_the_prompt_of_its_parent():
    state, _ = make_state()
    arrive(state, "A", PROMPT)
    with pytest.raises(AssertionError, match="prompt"):
        arrive(state, "B", PROMPT[1:], parent="A")


def test_new_weights_put_everybody_back_in_order_of_arrival():
    state, limits = make_state(max_requests=2)
    for name in "ABC":
        arrive(state, name, PROMPT)
    turn(state, limits, 3)
    assert list(state.running) == [0, 1]
    apply_new_weights(state)
    check_pool(state.pool)
    assert list(state.waiting) == [0, 1, 2] and held(state) == 0
    assert state.pool.hash_of == {} and len(state.pool.free) == 64
    assert [s.computed for s in state.waiting.values()] == [0, 0, 0]
    assert all(s.block_hashes for s in state.waiting.values())
    # A and B have tokens of their own by now, which are computed again with the prompt
    assert spans(turn(state, limits)) == [(0, 0, state.running[0].num_known - 1)]


def test_new_weights_forget_what_is_in_host_memory():
    state, limits = make_state(num_blocks=3, max_length=12, host_blocks=1)
    for name in "ABC":
        arrive(state, name, 4)
    turn(state, limits, 2)
    assert state.waiting[2].host == [[0]]
    apply_new_weights(state)
    assert (state.waiting[2].host, state.waiting[2].computed, state.free_host) == ([], 0, [0])


def test_new_weights_while_a_token_is_in_flight_are_refused():
    state, limits = make_state()
    arrive(state, "A", 2)
    launch(state, limits)
    with pytest.raises(AssertionError, match="'A' has a token in flight"):
        apply_new_weights(state)


@pytest.mark.parametrize(
    ("window", "position", "left"),
    [(None, 12, 0), (1, 11, 2), (1, 12, 3), (4, 11, 2), (4, 10, 1), (5, 12, 2), (13, 12, 0)],
)
def test_pages_left(window, position, left):
    # three pages of four, of which no query at `position` sees the first `left`
    state, limits = make_state((window,), share_prefixes=False)
    sequence = arrive(state, "A", 12)
    launch(state, limits)
    sequence.first[0], sequence.tables[0] = 0, [0, 1, 2]
    assert pages_past(state, sequence, 0, position) == left


def test_a_plan_of_another_state_is_refused():
    state, limits = make_state()
    arrive(state, "A", 2)
    plan = plan_batch(state, limits)
    state.free_rows.reverse()
    with pytest.raises(AssertionError, match="a plan named 0 where 7 is handed out"):
        apply_plan(state, plan)
