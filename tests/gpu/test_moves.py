"""`write_kv`, `page_tables` and block moves against their torch meaning, bit by bit."""

from typing import Any

import torch

from tcb import kernels
from tcb.kernels.cpu import operations as torch_ops
from tests.gpu.checking import BRAIN, HALF, sized

DTYPES = [(BRAIN,), (HALF,)]


@sized("dtype", DTYPES, DTYPES)
def test_keys_are_written_and_blocks_moved(dtype, small, device):
    tokens, blocks, page, heads, dim = (9, 5, 4, 2, 16) if small else (5000, 400, 16, 8, 128)
    new = torch.randn(2, tokens, heads, dim).to(dtype)
    slot = torch.randperm(blocks * page)[:tokens]
    slot[::7] = -1
    wanted = torch.full((2, blocks, page, heads, dim), -1.0, dtype=dtype)
    pair = torch.randperm(2 * blocks)[:8].view(2, 4)
    taken = torch.empty(4, page * heads * dim, dtype=dtype)
    mine = wanted.to(device)
    move(kernels, mine, *(part.to(device) for part in (new, slot, pair, taken)))
    move(torch_ops, wanted, new, slot, pair, taken)
    assert torch.equal(mine.cpu(), wanted), "differs from the torch meaning"


def move(meaning: Any, pool: torch.Tensor, new: Any, slot: Any, pair: Any, taken: Any) -> None:
    """Write, fork, gather and scatter in one pool [2, blocks, page, heads, dim]."""
    flat = pool.view(-1, taken.shape[1])
    meaning.write_kv(*new, *pool, slot)
    meaning.copy_blocks(flat, *pair)
    meaning.gather_blocks(flat, pair[0], taken)
    meaning.scatter_blocks(taken, flat, pair[1].flip(0))


@sized("", [()], [()])
def test_tables_are_edited_and_slots_derived(small, device):
    rows, page = (5, 4) if small else (300, 16)
    # a full group, with a column for every page, and a ring
    widths = 40, 6
    pages = torch.arange(2 * rows) % 3
    chunk = torch.arange(rows) % 7
    given = (
        torch.randint(0, 2000, (int(pages.sum()),)).int(),
        torch.cat([pages[:1] * 0, pages.cumsum(0)]).int(),
        (torch.arange(2 * rows) * 5 % (widths[0] - 3)).int(),
        torch.randperm(rows),
        torch.cat([chunk[:1] * 0, chunk.cumsum(0)]).int(),
        (torch.arange(rows) * 13 % ((widths[0] - 2) * page)).int(),
    )
    tables = [torch.randint(-1, 2000, (rows, width)).int() for width in widths]
    on_device = [table.to(device) for table in tables]
    mine = kernels.page_tables(on_device, *(part.to(device) for part in given), page)
    wanted = torch_ops.page_tables(tables, *given, page)
    for got, right in zip(on_device, tables, strict=True):
        assert torch.equal(got.cpu(), right), "edits differ"
    assert torch.equal(mine[0].cpu(), wanted[0]), "slots differ"
    for got, right in zip(mine[1], wanted[1], strict=True):
        assert torch.equal(got.cpu(), right), "block tables differ"
