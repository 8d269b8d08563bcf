"""`page_tables` against the definition of a ring, entry by entry."""

import random

import pytest
import torch

from tcb.kernels import page_tables, torch_ops


@pytest.fixture(params=[page_tables, torch_ops.page_tables], ids=["triton", "torch"])
def derive(request):
    return request.param


def expected(table, edits, rows, chunks, contexts, page_size, num_columns):
    """Table, slots and block table as lists, by the definition."""
    table = [list(row) for row in table]
    for row, column, block in edits:
        if row >= 0:
            table[row][column] = block
    slots, gathered = [], []
    for row, chunk, context in zip(rows, chunks, contexts, strict=True):
        blocks = table[row] if row >= 0 else [-1] * len(table[0])
        gathered.append(blocks[:num_columns])
        for position in range(context, context + chunk):
            block = blocks[position // page_size % len(blocks)]
            slots.append(-1 if block < 0 else block * page_size + position % page_size)
    return table, slots, gathered


def check(derive, table, edits, rows, chunks, contexts, page_size, device, **given):
    """Derive, and compare all that is written and returned."""
    columns = given.get("num_columns") or len(table[0])
    wanted = expected(table, edits, rows, chunks, contexts, page_size, columns)
    table = torch.tensor(table, dtype=torch.int32, device=device)
    edit = torch.tensor(edits, dtype=torch.int32, device=device).view(-1, 3)
    row = torch.tensor(rows, dtype=torch.int64, device=device)
    start = torch.tensor([0, *chunks], device=device).cumsum(0).int()
    context = torch.tensor(contexts, dtype=torch.int32, device=device)
    slot, block_table = derive(table, edit, row, start, context, page_size, **given)
    assert (slot.dtype, block_table.dtype) == (torch.int64, torch.int32)
    assert table.tolist() == wanted[0]
    tokens = sum(chunks)
    assert slot[:tokens].tolist() == wanted[1]
    assert (slot[tokens:] == -1).all()
    assert block_table.tolist() == wanted[2]


def random_problem(seed, sequences, columns, longest):
    """A table with edits, some of them padding; distinct rows; chunks that may wrap."""
    rng = random.Random(seed)
    rows = sequences + 3
    table = [[rng.randrange(-1, 500) for _ in range(columns)] for _ in range(rows)]
    places = [(row, column) for row in range(rows) for column in range(columns)]
    edits = [
        (*place, rng.randrange(500)) for place in rng.sample(places, rng.randrange(len(places)))
    ]
    edits += [(-1, 0, 7)] * rng.randrange(3)
    chosen = rng.sample(range(rows), sequences)
    chunks = [rng.randrange(longest) for _ in chosen]
    contexts = [rng.randrange(4 * longest) for _ in chosen]
    return table, edits, chosen, chunks, contexts


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("page_size", [1, 12, 16, 256])
def test_random_tables(derive, seed, page_size, device):
    check(derive, *random_problem(seed, 4, 5, 40), page_size, device)


def test_many_columns_tokens_and_edits(derive, device):
    problem = random_problem(1, 2, 300, 1400)
    assert len(problem[1]) > 300
    check(derive, *problem, 16, device)


def test_edits_come_first(derive, device):
    # the page of the new token is given in the same call
    check(derive, [[-1, -1]], [(0, 1, 9)], [0], [1], [16], 16, device)


def test_a_ring_reuses_its_oldest_column(derive, device):
    # pages 4 and 5 of a ring of three columns fall on the blocks of pages 1 and 2
    check(derive, [[7, 8, 9]], [], [0], [20], [64], 16, device)


def test_a_missing_block_gives_no_slot(derive, device):
    check(derive, [[3, -1]], [], [0], [10], [12], 16, device)


def test_padding_rows_hold_nothing(derive, device):
    check(derive, [[3, 4], [5, 6]], [], [1, -1, -1], [2, 1, 0], [3, 0, 0], 16, device)


@pytest.mark.parametrize("columns", [1, 2])
def test_fewer_columns(derive, columns, device):
    table = [[3, 4, -1], [5, -1, -1]]
    check(derive, table, [], [0, 1], [2, 3], [8, 0], 16, device, num_columns=columns)


def test_given_outputs_are_written(derive, device):
    slot = torch.full((9,), 99, device=device)
    block_table = torch.full((1, 2), 99, dtype=torch.int32, device=device)
    check(derive, [[3, 4]], [], [0], [4], [14], 16, device, slot=slot, block_table=block_table)
    assert slot.tolist() == [62, 63, 64, 65, -1, -1, -1, -1, -1]
    assert block_table.tolist() == [[3, 4]]


def test_a_slot_beyond_int32(derive, device):
    check(derive, [[2**31 - 1]], [], [0], [2], [3], 256, device)


def test_no_sequence(derive, device):
    check(derive, [[3, 4]], [(0, 0, 8)], [], [], [], 16, device)


def test_rows_may_be_int32(derive, device):
    integers = {"dtype": torch.int32, "device": device}
    slot, block_table = derive(
        torch.tensor([[3], [4]], **integers),
        torch.zeros(0, 3, **integers),
        torch.tensor([1], **integers),
        torch.tensor([0, 1], **integers),
        torch.tensor([5], **integers),
        16,
    )
    assert (slot.tolist(), block_table.tolist()) == ([69], [[4]])


TENSORS = {
    "table": torch.zeros(4, 2).int(),
    "edit": torch.zeros(3, 3).int(),
    "row": torch.zeros(2).long(),
    "query_start": torch.zeros(3).int(),
    "context_len": torch.zeros(2).int(),
    "page_size": 16,
}
WRONG = [
    ("table", TENSORS["table"][0]),
    ("table", TENSORS["table"].long()),
    ("table", torch.zeros(2, 4).int().T),
    ("edit", torch.zeros(3, 2).int()),
    ("edit", TENSORS["edit"].long()),
    ("row", torch.zeros(2)),
    ("row", torch.zeros(2, 1).long()),
    ("query_start", torch.zeros(2).int()),
    ("query_start", torch.zeros(3).long()),
    ("context_len", torch.zeros(3).int()),
    ("context_len", TENSORS["context_len"].to("meta")),
    ("page_size", 0),
    ("num_columns", 0),
    ("num_columns", 3),
    ("slot", torch.zeros(4).int()),
    ("block_table", torch.zeros(2, 1).int()),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_argument_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name}:"):
        page_tables(**TENSORS | {name: value})
