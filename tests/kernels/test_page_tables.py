"""`page_tables` against the definition of a ring, entry by entry."""

import random
import re
from dataclasses import dataclass, field, replace

import pytest
import torch

from tcb.kernels import page_tables
from tcb.kernels.cpu import operations as torch_ops


@pytest.fixture(params=[page_tables, torch_ops.page_tables], ids=["triton", "torch"])
def derive(request):
    return request.param


@dataclass(frozen=True)
class Problem:
    """What a batch asks for, as lists.

    tables  a group: rows of blocks          edits  a group: a sequence: (page, blocks)
    surplus behind the batch: edits, and places in `slot` and for sequences in `query_start`
    """

    tables: list
    rows: list
    chunks: list
    contexts: list
    edits: list = field(default_factory=list)
    page_size: int = 16
    num_pages: int | None = None
    surplus: int = 0


def expected(problem):
    """Tables, slots and block tables as lists, by the definition."""
    tables = [[list(row) for row in table] for table in problem.tables]
    slots, seen = [], []
    for g, table in enumerate(tables):
        columns = len(table[0])
        for row, (page, blocks) in zip(problem.rows, problem.edits[g], strict=True):
            for logical, block in enumerate(blocks, page):
                table[row][logical % columns] = block
        own = [table[row] if row >= 0 else [-1] * columns for row in problem.rows]
        seen.append([blocks[: problem.num_pages] for blocks in own])
        slots.append([])
        for blocks, chunk, context in zip(own, problem.chunks, problem.contexts, strict=True):
            for position in range(context, context + chunk):
                page, within = divmod(position, problem.page_size)
                block = blocks[page % columns]
                slots[g].append(-1 if block < 0 else block * problem.page_size + within)
    return tables, slots, seen


def edit_lists(problem):
    """The edits as `new_block`, `new_block_start` and `first_new_page`."""
    entries = [entry for group in problem.edits for entry in group]
    starts = [0]
    for _, blocks in entries:
        starts.append(starts[-1] + len(blocks))
    surplus = [2**31 - 1] * problem.surplus
    return (
        [block for _, blocks in entries for block in blocks] + surplus,
        starts,
        [page for page, _ in entries],
    )


def check(derive, problem, device, **given):
    """Derive, and compare all that is written and returned."""
    if not problem.edits:
        nothing = [[(0, [])] * len(problem.rows)] * len(problem.tables)
        problem = replace(problem, edits=nothing)
    tables, slots, seen = expected(problem)

    def integers(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    found = [integers(table) for table in problem.tables]
    tokens = sum(problem.chunks)
    if problem.surplus and not given:
        shape = len(found), tokens + problem.surplus
        given = {"slot": torch.full(shape, 99, device=device)}
    slot, block_tables = derive(
        found,
        *map(integers, edit_lists(problem)),
        torch.tensor(problem.rows, dtype=torch.int64, device=device),
        torch.tensor([0, *problem.chunks], device=device).cumsum(0).int(),
        integers(problem.contexts),
        problem.page_size,
        num_pages=problem.num_pages,
        **given,
    )
    assert slot.dtype == torch.int64 and {table.dtype for table in block_tables} == {torch.int32}
    assert [table.tolist() for table in found] == tables
    assert slot[:, :tokens].tolist() == slots
    assert (slot[:, tokens:] == -1).all()
    assert [table.tolist() for table in block_tables] == seen


def random_problem(seed, columns, sequences=4, longest=40, page_size=16):
    """Distinct rows, some of them padding, with edits anywhere on the ring; chunks may wrap."""
    rng = random.Random(seed)
    rows = sequences + 3
    tables = [
        [[rng.randrange(-1, 500) for _ in range(count)] for _ in range(rows)] for count in columns
    ]
    chosen = rng.sample(range(rows), sequences)
    if seed % 2:
        chosen[rng.randrange(sequences)] = -1
    edits = [
        [
            (
                rng.randrange(3 * count),
                [rng.randrange(500) for _ in range(rng.randrange(count + 1) * (row >= 0))],
            )
            for row in chosen
        ]
        for count in columns
    ]
    return Problem(
        tables=tables,
        rows=chosen,
        chunks=[rng.randrange(longest) for _ in chosen],
        contexts=[rng.randrange(4 * longest) for _ in chosen],
        edits=edits,
        page_size=page_size,
        surplus=rng.randrange(3),
    )


@pytest.mark.parametrize("columns", [(5,), (1, 7), (12, 3, 4), (2, 2, 2, 9)])
@pytest.mark.parametrize("page_size", [1, 12, 256])
@pytest.mark.parametrize("seed", range(2))
def test_random_tables(derive, seed, page_size, columns, device):
    check(derive, random_problem(seed, columns, page_size=page_size), device)


@pytest.mark.parametrize("columns", [(300,), (290, 700)])
def test_many_columns_tokens_and_edits(derive, columns, device):
    problem = random_problem(2, columns, sequences=2, longest=1400)
    assert sum(problem.chunks) > 600
    edits = [[(count - 9, [*range(280)]), (3, [*range(7)])] for count in columns]
    check(derive, replace(problem, edits=edits), device)


def test_edits_come_first(derive, device):
    # the page of the new token is given in the same call
    edits = [[(1, [9])]]
    check(derive, Problem([[[-1, -1]]], [0], [1], [16], edits), device)


def test_every_edit_finds_its_group_and_sequence(derive, device):
    tables = [[[-1] * 4] * 3, [[-1] * 2] * 3]
    edits = [[(0, [1]), (0, []), (1, [2, 3])], [(3, [4, 5]), (0, [6]), (5, [])]]
    check(derive, Problem(tables, [2, 0, 1], [1, 1, 30], [0, 0, 20], edits), device)


def test_edits_go_round_the_ring(derive, device):
    # pages 5, 6, 7 of a ring of three columns: the last column, then the first two
    check(derive, Problem([[[7, 8, 9]]], [0], [40], [80], [[(5, [1, 2, 3])]]), device)


def test_a_ring_reuses_its_oldest_column(derive, device):
    # pages 4 and 5 of a ring of three columns fall on the blocks of pages 1 and 2
    check(derive, Problem([[[7, 8, 9]]], [0], [20], [64]), device)


def test_rows_of_no_sequence_stay(derive, device):
    check(derive, Problem([[[3, 4], [5, 6], [7, 8]]], [1], [2], [3], [[(1, [9])]]), device)


def test_a_missing_block_gives_no_slot(derive, device):
    check(derive, Problem([[[3, -1]]], [0], [10], [12]), device)


def test_padding_rows_hold_nothing(derive, device):
    check(derive, Problem([[[3, 4], [5, 6]]], [1, -1, -1], [2, 1, 0], [3, 0, 0]), device)


@pytest.mark.parametrize("num_pages", [1, 2, 3])
def test_no_more_columns_than_pages(derive, num_pages, device):
    # the second group has fewer columns than pages: it stays a ring
    tables = [[[3, 4, -1], [5, -1, -1]], [[7, 8], [9, -1]]]
    problem = Problem(tables, [0, 1], [2, 3], [8, 0], num_pages=num_pages)
    check(derive, problem, device)


def test_given_outputs_are_written(derive, device):
    slot = torch.full((2, 12), 99, device=device)[:, :9]
    tables = [torch.full((1, n), 99, dtype=torch.int32, device=device) for n in (2, 1)]
    problem = Problem([[[3, 4]], [[5]]], [0], [4], [14])
    check(derive, problem, device, slot=slot, block_tables=tables)
    assert slot.tolist() == [[62, 63, 64, 65] + [-1] * 5, [94, 95, 80, 81] + [-1] * 5]
    assert [table.tolist() for table in tables] == [[[3, 4]], [[5]]]


def test_a_slot_beyond_int32(derive, device):
    check(derive, Problem([[[2**31 - 1]]], [0], [2], [3], page_size=256), device)


def test_no_sequence(derive, device):
    check(derive, Problem([[[3, 4]], [[5]]], [], [], [], [[], []], surplus=3), device)


def test_rows_may_be_int32(derive, device):
    def integers(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    tables = [torch.tensor([[3], [4]], dtype=torch.int32, device=device)]
    edits = integers(), integers(0, 0), integers(0)
    slot, [block_table] = derive(tables, *edits, integers(1), integers(0, 1), integers(5), 16)
    assert (slot.tolist(), block_table.tolist()) == ([[69]], [[4]])


TENSORS = {
    "tables": [torch.zeros(4, 2).int(), torch.zeros(4, 3).int()],
    "new_block": torch.zeros(3).int(),
    "new_block_start": torch.zeros(5).int(),
    "first_new_page": torch.zeros(4).int(),
    "row": torch.zeros(2).long(),
    "query_start": torch.zeros(3).int(),
    "context_len": torch.zeros(2).int(),
    "page_size": 16,
}
TABLE = TENSORS["tables"][0]
WRONG = [
    ("tables[1]", [TABLE, TABLE[0]]),
    ("tables[0]", [TABLE.long(), TABLE]),
    ("tables[1]", [TABLE, torch.zeros(2, 4).int().T]),
    ("tables[1]", [TABLE, torch.zeros(4, 4).int()[:, :3]]),
    ("tables[0]", [torch.zeros(4, 0).int(), TABLE]),
    ("new_block", torch.zeros(3, 3).int()),
    ("new_block", TENSORS["new_block"].long()),
    ("new_block_start", torch.zeros(3).int()),
    ("first_new_page", torch.zeros(2, 2).int()),
    ("row", torch.zeros(2)),
    ("row", torch.zeros(2, 1).long()),
    ("query_start", torch.zeros(2).int()),
    ("query_start", torch.zeros(3).long()),
    ("context_len", torch.zeros(3).int()),
    ("context_len", TENSORS["context_len"].to("meta")),
    ("page_size", 0),
    ("num_pages", 0),
    ("slot", torch.zeros(2, 4).int()),
    ("slot", torch.zeros(4).long()),
    ("block_tables", [TABLE]),
    ("block_tables[1]", [torch.zeros(2, 2).int(), torch.zeros(2, 2).int()]),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_argument_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{re.escape(name)}:"):
        page_tables(**TENSORS | {name.partition("[")[0]: value})


FORMER = {"edit": "new_block", "edit_start": "new_block_start", "edit_page": "first_new_page"}


def test_former_names_are_accepted():
    former = {name: TENSORS[present] for name, present in FORMER.items()}
    others = {name: value for name, value in TENSORS.items() if name not in FORMER.values()}
    slot, _ = page_tables(**others, **former)
    assert slot.shape == (2, 0)


@pytest.mark.parametrize("name", FORMER)
def test_an_argument_is_not_given_by_both_its_names(name):
    with pytest.raises(TypeError, match=f"^{FORMER[name]}: given twice, also as {name}"):
        page_tables(**TENSORS, **{name: TENSORS[FORMER[name]]})
