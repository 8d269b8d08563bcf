"""How plans are laid out, one small case each."""

from array import array
from itertools import pairwise

from tcb.planning.packing import pack_batch
from tcb.planning.request import SamplingParams
from tcb.planning.schedule import plan_batch
from tcb.planning.state import apply_plan
from tests.planning.small_cases import TOKEN, arrive, land, launch, make_state, turn


def pack_next(state, limits):
    plan = plan_batch(state, limits)
    return plan, pack_batch(state, plan)


def lists(*arrays):
    assert all(isinstance(a, array) and a.typecode == "i" for a in arrays)
    return [list(a) for a in arrays]


def new_blocks(batch):
    """Entry by entry, the (logical page, block) pairs of each."""
    entries = zip(batch.first_new_page, pairwise(batch.new_block_start), strict=True)
    return [list(enumerate(batch.new_block[start:end], page)) for page, (start, end) in entries]


def test_an_empty_plan_is_an_empty_batch():
    state, limits = make_state((None, 3))
    _, batch = pack_next(state, limits)
    assert (batch.num_tokens, len(batch.rows), batch.max_seq_len) == (0, 0, 0)
    assert lists(batch.query_start, batch.new_block, batch.new_block_start) == [[0], [], [0]]


def test_a_prompt():
    state, limits = make_state()
    arrive(state, "A", (11, 12, 13, 14, 15), sampling=SamplingParams(do_sample=True, seed=3))
    _, batch = pack_next(state, limits)
    assert lists(batch.token_ids, batch.positions) == [[11, 12, 13, 14, 15], [0, 1, 2, 3, 4]]
    assert lists(batch.query_start, batch.context_len, batch.rows) == [[0, 5], [0], [0]]
    assert lists(batch.sample_index, batch.sample_row) == [[4], [0]]
    assert new_blocks(batch) == [[(0, 0), (1, 1)]]
    assert batch.admitted == ((0, SamplingParams(do_sample=True, seed=3)),)
    assert (batch.num_decodes, batch.max_seq_len) == (0, 5)


def test_single_tokens_come_before_chunks_and_samples_follow_the_batch():
    state, limits = make_state(max_batch_tokens=12)
    arrive(state, "A", 3)
    arrive(state, "B", 4)
    turn(state, limits)
    arrive(state, "C", 3)
    arrive(state, "D", 1)
    plan, batch = pack_next(state, limits)
    # A decodes where it has room, B enters a page, C and D come in
    assert plan.decodes == (0,) and [chunk.seq_id for chunk in plan.chunks] == [1, 2, 3]
    assert plan.sample_seq_ids == (0, 1, 3, 2)
    c, d = state.waiting[2].known(), state.waiting[3].known()
    assert lists(batch.token_ids) == [[TOKEN, TOKEN, *d, *c]]
    assert lists(batch.positions) == [[3, 4, 0, 0, 1, 2]]
    assert lists(batch.query_start, batch.context_len) == [[0, 1, 2, 3, 6], [3, 4, 0, 0]]
    assert lists(batch.rows, batch.sample_row) == [[0, 1, 3, 2], [0, 1, 3, 2]]
    assert lists(batch.sample_index) == [[0, 1, 2, 5]]
    assert batch.num_decodes == 3 and [row for row, _ in batch.admitted] == [2, 3]


def test_a_chunk_that_does_not_end_the_prompt_has_no_sample():
    state, limits = make_state(max_batch_tokens=3)
    arrive(state, "A", 5)
    _, batch = pack_next(state, limits)
    assert lists(batch.sample_index, batch.sample_row) == [[], []]


def test_a_token_in_flight_is_left_to_the_device():
    state, limits = make_state(depth=1)
    arrive(state, "A", 2)
    launch(state, limits)
    _, batch = pack_next(state, limits)
    assert lists(batch.token_ids, batch.positions, batch.rows) == [[-1], [2], [0]]


def test_a_token_in_flight_is_left_to_the_device_where_a_page_is_entered():
    state, limits = make_state(depth=1)
    arrive(state, "A", 4)
    launch(state, limits)
    plan, batch = pack_next(state, limits)
    assert plan.decodes == () and list(batch.token_ids) == [-1] and new_blocks(batch) == [[(1, 1)]]


def test_every_group_gets_its_pages():
    state, limits = make_state((None, 4), max_batch_tokens=4)
    arrive(state, "A", 40)
    for page in range(5):
        plan, batch = pack_next(state, limits)
        [chunk] = plan.chunks
        assert new_blocks(batch) == [[(page, block)] for (block,) in chunk.fresh]
        apply_plan(state, plan)


def test_new_blocks_are_in_the_order_of_the_batch():
    state, limits = make_state((None, 4), max_batch_tokens=12)
    arrive(state, "A", 3)
    turn(state, limits)
    arrive(state, "B", 6)
    arrive(state, "C", 1)
    plan, batch = pack_next(state, limits)
    b, c = plan.chunks
    # A decodes where it has room
    assert plan.decodes == (0,) and lists(batch.rows) == [[0, c.row, b.row]]
    by_group = [[[], [*enumerate(c.fresh[g])], [*enumerate(b.fresh[g])]] for g in (0, 1)]
    assert new_blocks(batch) == by_group[0] + by_group[1]


def test_a_hit_enters_the_pages_that_are_read():
    state, limits = make_state((None, 5), max_batch_tokens=64)
    prompt = tuple(range(18))
    arrive(state, "A", prompt, max_new_tokens=1)
    turn(state, limits)
    arrive(state, "B", prompt)
    plan, batch = pack_next(state, limits)
    [chunk] = plan.chunks
    full, sliding = new_blocks(batch)
    assert full == list(enumerate((*chunk.shared[0], *chunk.fresh[0])))
    assert sliding == [(3, chunk.shared[1][0]), (4, chunk.fresh[1][0])]
    assert list(batch.context_len) == [16]


def test_blocks_that_move_are_named():
    state, limits = make_state(num_blocks=3, max_length=12, host_blocks=1)
    for name in "ABC":
        arrive(state, name, 4, max_new_tokens=2)
    turn(state, limits)
    block = state.running[2].tables[0][0]
    plan, batch = pack_next(state, limits)
    assert batch.offload == ((block, 0),) and batch.restore == ()
    apply_plan(state, plan)
    land(state, plan)
    while not batch.restore:
        plan, batch = pack_next(state, limits)
        apply_plan(state, plan)
        land(state, plan)
    assert batch.restore == ((0, plan.chunks[-1].fresh[0][0]),)


def test_copies_of_forks_are_named():
    state, limits = make_state((None, 3))
    prompt = tuple(range(6))
    arrive(state, "A", prompt)
    arrive(state, "A0", prompt, parent="A")
    turn(state, limits)
    sources = [table[-1] for table in state.running[0].tables]
    plan, batch = pack_next(state, limits)
    [fork] = plan.chunks
    assert batch.copies == tuple(zip(sources, (b[0] for b in fork.fresh), strict=True))
