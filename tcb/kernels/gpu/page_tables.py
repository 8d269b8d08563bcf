"""Edit the block tables of all layer groups and find every new token's slot: one launch.

    position = context_len[i] + index in the chunk                             for every new token
    column   = page % columns                                   where a group keeps a logical page
    tables[g][row[i], column] = the block of each new page
    slot[g]  = tables[g][row[i], column] * page_size + position % page_size,  page = position's page
    block_tables[g][i] = tables[g][row[i]]

A row is a ring over its columns, so a sliding group whose next page falls on its oldest recycles it
with no edit. A sequence's new pages follow one another, so whether a column is edited, and to which
block, is arithmetic: no program reads an entry that this launch writes, and none has to wait. It
knows neither windows nor who owns a block.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from tcb.kernels.checks import check_page_tables, expect
from tcb.kernels.contract import Launch, start
from tcb.kernels.cpu import operations as torch_ops
from tcb.kernels.dispatch import use_triton

_BLOCK_EDITS = 256
_BLOCK_TOKENS = 512
_BLOCK_COLUMNS = 128


def page_tables(
    tables: Sequence[torch.Tensor],
    edit: torch.Tensor,
    edit_start: torch.Tensor,
    edit_page: torch.Tensor,
    row: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    page_size: int,
    *,
    num_pages: int | None = None,
    slot: torch.Tensor | None = None,
    block_tables: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Write the edits into `tables`; return every new token's slots and the batch's block tables.

    tables       a group: [rows, columns] int32, contiguous, written; -1 where there is no block
    edit         [edits] int32, the blocks of new pages
    edit_start   [groups * sequences + 1] int32: entry k, for sequence i of group g at
                 k = g * sequences + i, has the blocks edit[edit_start[k] : edit_start[k + 1]]
    edit_page    [groups * sequences] int32, the logical page of the first of them; the others are
                 the pages behind it, at most as many as the group has columns
    row          [sequences] int32 or int64, a row of the tables, none twice; a negative one is
                 padding and has no edits
    query_start  [sequences + 1] int32         context_len  [sequences] int32
    num_pages    more than every page of the batch: no result needs more columns

    slot          [groups, tokens] int64, block * page_size + position % page_size; -1 without a
                  block
    block_tables  a group: [sequences, columns, or num_pages if that is less] int32; contiguous
                  where given

    `slot` and `block_tables` are written in place where given; `edit` and `slot` may be longer than
    the batch: the surplus is not read, or ends in -1. Nothing is written past the end of a `slot`.
    Without `slot` the host waits for the number of tokens, the last of `query_start`.
    Raises ValueError on a tensor whose shape, dtype, device or stride does not fit.
    """
    tensors = edit, edit_start, edit_page, row, query_start, context_len
    check_page_tables(tables, *tensors, page_size, num_pages)
    device, sequences = row.device, row.shape[0]
    widths = [min(table.shape[1], num_pages or table.shape[1]) for table in tables]
    if slot is not None:
        expect("slot", slot, (len(tables), None), device=device, dtype=torch.int64)
    if block_tables is not None:
        _check_block_tables(block_tables, sequences, widths, device)
    if not use_triton(row):
        return torch_ops.page_tables(
            tables, *tensors, page_size, num_pages=num_pages, slot=slot, block_tables=block_tables
        )
    if slot is None:
        shape = len(tables), int(query_start[-1])
        slot = torch.empty(shape, dtype=torch.int64, device=device)
    if block_tables is None:
        block_tables = [
            torch.empty((sequences, width), dtype=torch.int32, device=device) for width in widths
        ]
    results = slot, tuple(block_tables)
    start(plan_launches(tuple(tables), *tensors, page_size, num_pages, *results), row)
    return results


def plan_launches(
    tables: tuple[torch.Tensor, ...],
    edit: torch.Tensor,
    edit_start: torch.Tensor,
    edit_page: torch.Tensor,
    row: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    page_size: int,
    num_pages: int | None,
    slot: torch.Tensor,
    block_tables: tuple[torch.Tensor, ...],
) -> list[Launch]:
    """A group: one program a sequence, and one for the slots of no token."""
    columns = tuple(table.shape[1] for table in tables)
    arguments = (
        tables,
        block_tables,
        columns,
        edit,
        edit_start,
        edit_page,
        row,
        query_start,
        context_len,
        slot,
        row.shape[0],
        slot.shape[1],
        num_pages or max(columns, default=0),
        slot.stride(0),
    )
    constants = {
        "GROUPS": len(tables),
        "PAGE_SIZE": page_size,
        "BLOCK_EDITS": _BLOCK_EDITS,
        "BLOCK_TOKENS": _BLOCK_TOKENS,
        "BLOCK_COLUMNS": _BLOCK_COLUMNS,
    }
    programs = len(tables) * (row.shape[0] + 1)
    return [Launch(page_tables_kernel, programs, arguments, constants)] if programs else []


def _check_block_tables(block_tables, sequences, widths, device):
    if len(block_tables) != len(widths):
        raise ValueError(f"block_tables: expected {len(widths)} tensors, got {len(block_tables)}")
    for g, (block_table, width) in enumerate(zip(block_tables, widths, strict=True)):
        name, shape = f"block_tables[{g}]", (sequences, width)
        expect(name, block_table, shape, device=device, dtype=torch.int32, contiguous=True)


# the small tensors are parts of one upload, so their alignment is that of chance
@triton.jit(
    do_not_specialize=["num_sequences", "num_slots", "num_pages", "stride_slot_group"],
    do_not_specialize_on_alignment=[
        "edit_ptr",
        "edit_start_ptr",
        "edit_page_ptr",
        "row_ptr",
        "query_start_ptr",
        "context_len_ptr",
    ],
)
def page_tables_kernel(
    table_ptrs,
    block_table_ptrs,
    all_columns,
    edit_ptr,
    edit_start_ptr,
    edit_page_ptr,
    row_ptr,
    query_start_ptr,
    context_len_ptr,
    slot_ptr,
    num_sequences,
    num_slots,
    num_pages,
    stride_slot_group,
    GROUPS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_EDITS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Program g * (sequences + 1) + i serves sequence i in group g; the one behind the last writes
    -1 from the last token on.
    """
    group = tl.program_id(0) // (num_sequences + 1)
    sequence = tl.program_id(0) % (num_sequences + 1)
    columns = choose(all_columns, group, GROUPS)
    table_ptr = choose(table_ptrs, group, GROUPS)
    slot_ptr += group.to(tl.int64) * stride_slot_group
    first = tl.load(query_start_ptr + sequence)
    if sequence == num_sequences:
        no_slot = tl.full([BLOCK_TOKENS], -1, tl.int64)
        start = first
        while start < num_slots:
            token = start + tl.arange(0, BLOCK_TOKENS)
            tl.store(slot_ptr + token, no_slot, mask=token < num_slots)
            start += BLOCK_TOKENS
        return

    row = tl.load(row_ptr + sequence).to(tl.int64)
    is_live = row >= 0
    table_ptr += row * columns
    entry = group * num_sequences + sequence
    first_edit = tl.load(edit_start_ptr + entry)
    num_edits = tl.load(edit_start_ptr + entry + 1) - first_edit
    num_edits = tl.where(is_live, num_edits, 0)
    edit_ptr += first_edit
    edit_column = tl.load(edit_page_ptr + entry) % columns

    start = 0
    while start < num_edits:
        index = start + tl.arange(0, BLOCK_EDITS)
        live = index < num_edits
        block = tl.load(edit_ptr + index, mask=live)
        tl.store(table_ptr + (edit_column + index) % columns, block, mask=live)
        start += BLOCK_EDITS

    width = tl.minimum(columns, num_pages)
    block_table_ptr = choose(block_table_ptrs, group, GROUPS) + sequence.to(tl.int64) * width
    start = 0
    while start < width:
        column = start + tl.arange(0, BLOCK_COLUMNS)
        live = column < width
        block = edited_entry(
            table_ptr, column, live & is_live, columns, edit_ptr, edit_column, num_edits
        )
        tl.store(block_table_ptr + column, block, mask=live)
        start += BLOCK_COLUMNS

    num_tokens = tl.load(query_start_ptr + sequence + 1) - first
    context = tl.load(context_len_ptr + sequence)
    slot_ptr += first
    start = 0
    while start < num_tokens:
        token = start + tl.arange(0, BLOCK_TOKENS)
        live = (token < num_tokens) & (first + token < num_slots)
        position = context + token
        column = position // PAGE_SIZE % columns
        block = edited_entry(
            table_ptr, column, live & is_live, columns, edit_ptr, edit_column, num_edits
        )
        slot = block.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        tl.store(slot_ptr + token, tl.where(block < 0, -1, slot), mask=live)
        start += BLOCK_TOKENS


@triton.jit
def choose(values, group, GROUPS: tl.constexpr):
    """values[group], where `group` is known to the program only."""
    chosen = values[0]
    for g in tl.static_range(1, GROUPS):
        if group == g:
            chosen = values[g]
    return chosen


@triton.jit
def edited_entry(table_ptr, column, live, columns, edit_ptr, edit_column, num_edits):
    """The blocks in these columns of a row after its edits; -1 where not live."""
    index = (column - edit_column + columns) % columns
    is_new = index < num_edits
    kept = tl.load(table_ptr + column, mask=live & (index >= num_edits), other=-1)
    new = tl.load(edit_ptr + index, mask=live & is_new, other=-1)
    return tl.where(is_new, new, kept)
