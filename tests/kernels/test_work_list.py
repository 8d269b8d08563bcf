"""The work list of a batch against one made on the host, and attention over grids of any size."""

import pytest
import torch

from tcb.kernels import list_work, paged_attention
from tcb.kernels.contract import Attention, AttentionOptions, BatchShape, Listing
from tcb.kernels.gpu.launch import start
from tcb.kernels.gpu.paged_attention import choose_tiles, plan_launches
from tcb.kernels.gpu.tuning import DeviceFacts
from tcb.kernels.gpu.work_list import plan_launches as plan_list
from tcb.kernels.gpu.work_list import reserve, rooms
from tests.support.oracle import Case, assert_close, build

MANY = tuple((17 * i % 50, 1 + i % 3) for i in range(150))
# (context, new tokens) of sequences
BATCHES = {
    "one token": ((0, 1),),
    "one sequence": ((5, 100),),
    "short and long": ((300, 1), (0, 70), (5, 2), (64, 64), (0, 1)),
    "many short, one long": (*((3, 1) for _ in range(70)), (100, 90), *((9, 2) for _ in range(9))),
    "more sequences than lanes": MANY,
    "more tiles than a block": ((40, 700), (0, 900), (1000, 800), (7, 1)),
    "none has tokens": ((4, 0), (0, 0)),
    "some have none": ((0, 0), (7, 20), (9, 0), (0, 33), (2, 1), (5, 0)),
}


def expected(batch, shape, *, small):
    """Items of one of the two lists, by cost, then by sequence and tile."""
    items = []
    rows_of_a_tile = shape.small_rows if small else shape.tile_rows
    for sequence, (context, chunk) in enumerate(batch):
        rows = chunk * shape.q_per_kv
        if (rows <= shape.small_rows) != small:
            continue
        for first in range(0, rows, rows_of_a_tile):
            last = min(first + rows_of_a_tile, rows) - 1
            first_key = 0
            if shape.window is not None:
                first_key = max(0, context + first // shape.q_per_kv - shape.window + 1)
            cost = context + last // shape.q_per_kv + 1 - first_key
            items.append((-cost, sequence, first // rows_of_a_tile))
    return [(sequence, tile) for _, sequence, tile in sorted(items)]


def fill(batch, device, *, q_per_kv, window, small_rows, tile_rows, before=0, behind=0):
    """The shape and the two lists of a batch, with padding tokens before and behind it."""
    sizes = [before, *(chunk for _, chunk in batch)]
    shape = BatchShape(sum(sizes) + behind, len(batch), q_per_kv, window, small_rows, tile_rows)
    work = reserve(shape, device)
    for tensor in (work.item, work.count, work.found):
        tensor.fill_(-7)
    query_start = torch.tensor(sizes, device=device).cumsum(0).int()
    context_len = torch.tensor([context for context, _ in batch], device=device).int()
    start(plan_list(work, query_start, context_len), query_start)
    found = {}
    for small, (item, count) in ((True, work.small()), (False, work.tiles())):
        if len(item):
            assert 0 <= count.item() <= len(item)
            found[small] = [tuple(pair) for pair in item[: count.item()].tolist()]
            assert (item[count.item() :] == -7).all()
    return shape, found


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_order(batch, window, device):
    for q_per_kv, small_rows, tile_rows in ((2, 16, 32), (5, 0, 16), (1, 16, 64)):
        fields = {"q_per_kv": q_per_kv, "small_rows": small_rows, "tile_rows": tile_rows}
        shape, found = fill(batch, device, window=window, **fields)
        assert found == {s: expected(batch, shape, small=s) for s in found}
        assert set(found) == ({True, False} if small_rows else {False})


@pytest.mark.parametrize(("before", "behind"), [(0, 9), (40, 0), (7, 130)])
def test_padding_tokens_are_no_items(before, behind, device):
    batch, fields = BATCHES["some have none"], {"q_per_kv": 3, "window": 9}
    shape, found = fill(
        batch, device, before=before, behind=behind, small_rows=16, tile_rows=32, **fields
    )
    assert found == {s: expected(batch, shape, small=s) for s in (True, False)}


def test_all_are_small(device):
    batch = ((5, 1), (90, 2), (5, 1), (0, 0))
    shape, found = fill(batch, device, q_per_kv=4, window=None, small_rows=16, tile_rows=0)
    assert found == {True: [(1, 0), (0, 0), (2, 0)]}
    assert rooms(shape)[1] == 0


def test_room_is_a_matter_of_shapes():
    # 100 sequences of 5 rows have a tile of 64 each, though their rows would fit into 8
    shape = BatchShape(500, 100, 1, None, 0, 64)
    small, tiles = rooms(shape)
    assert tiles >= 100
    assert small == 0


CASE = Case(((0, 40), (0, 0), (7, 0), (90, 3), (0, 1), (33, 50)), padding=5, window=45, page_size=4)


def launches_of(problem, work_list=None, processors=4):
    facts = DeviceFacts("interpreter", processors)
    options = AttentionOptions(CASE.window, None, problem.sinks, None)
    attention = Attention(*problem.chunks, options, torch.zeros_like(problem.query))
    tiles = choose_tiles(facts, Listing(*lengths_of(problem), CASE.window, False))
    if work_list is None:
        work_list = reserve(tiles[0], problem.query.device)
    return plan_launches(facts, attention, tiles, work_list)


def lengths_of(problem):
    return problem.query, problem.value, problem.query_start, problem.context_len


def test_the_number_of_programs_changes_no_bit(device):
    problem = build(CASE, device)
    work = list_work(*lengths_of(problem), window=CASE.window)
    # 9 pairs of a tile and a key-value head and more, and one program for all
    results = []
    for programs in (1, 2, 3, 5, 40):
        launches = [launch._replace(programs=programs) for launch in launches_of(problem, work)]
        start(launches, problem.query)
        results.append(launches[0].arguments[5].ptr)
    assert_close(results[0], problem)
    assert all(torch.equal(result, results[0]) for result in results)


def test_the_grid_is_a_matter_of_shapes(device):
    problem = build(CASE, device)
    few = [launch.programs for launch in launches_of(problem, processors=4)]
    many = [launch.programs for launch in launches_of(problem, processors=100_000)]
    assert all(0 < a < b for a, b in zip(few, many, strict=True))
    assert max(many) < 1000


def test_another_list_is_refused(device):
    problem = build(CASE, device)
    work = list_work(*lengths_of(problem), window=CASE.window)
    given = paged_attention(*problem.chunks, window=CASE.window, work_list=work)
    assert torch.equal(given, paged_attention(*problem.chunks, window=CASE.window))
    with pytest.raises(ValueError, match=r"^work_list: expected one for .*window=44.* got .*=45"):
        paged_attention(*problem.chunks, window=CASE.window - 1, work_list=work)


@pytest.mark.parametrize("name", ["query", "value", "query_start", "context_len"])
def test_wrong_tensors_are_refused_by_name(name, device):
    names = "query", "value", "query_start", "context_len"
    tensors = dict(zip(names, lengths_of(build(CASE, device)), strict=True))
    with pytest.raises(ValueError, match=f"^{name}:"):
        list_work(**tensors | {name: tensors[name][None]})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("query", {"query": torch.zeros(4, 3, 16), "value": torch.zeros(4, 2, 16)}),
        ("query", {"query": torch.zeros(4, 2, 16), "value": torch.zeros(4, 0, 16)}),
        ("query", {"query": torch.zeros(4, 2, 16, dtype=torch.int64)}),
        ("value", {"query": torch.zeros(4, 2, 16), "value": torch.zeros(5, 2, 16)}),
        ("value", {"query": torch.zeros(4, 2, 16), "value": torch.zeros(4, 2, 16).half()}),
        ("window", {"window": 0}),
    ],
)
def test_wrong_shapes_and_options_are_refused_by_name(name, change, device):
    names = "query", "value", "query_start", "context_len"
    fitting = dict(zip(names, lengths_of(build(CASE, device)), strict=True))
    moved = {
        key: value.to(device) if isinstance(value, torch.Tensor) else value
        for key, value in change.items()
    }
    with pytest.raises(ValueError, match=f"^{name}:"):
        list_work(**fitting | moved)


@pytest.mark.parametrize("work_list", ["all", 1, torch.zeros(3, 2)])
def test_what_is_no_list_is_refused(work_list, device):
    problem = build(CASE, device)
    with pytest.raises(ValueError, match=r"^work_list: expected None or a WorkList, got"):
        next(launches_of(problem, work_list))


def test_torch_operations_need_no_list(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert list_work(*lengths_of(build(CASE, torch.device("cpu")))) is None
