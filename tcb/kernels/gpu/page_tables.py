"""Write new blocks into the block tables of all layer groups and find every new token's slot.

    position = context_len[i] + index in the chunk                             for every new token
    column   = page % columns                                   where a group keeps a logical page
    tables[g][row[i], column] = the block of each new page
    slot[g]  = tables[g][row[i], column] * page_size + position % page_size,  page = position's page
    block_tables[g][i] = tables[g][row[i]]

A row is a ring over its columns, so a sliding group whose next page falls on its oldest recycles it
without a new block. A sequence's new pages follow one another, so whether a column is new, and of
which block, is arithmetic: one launch does it all, and no program reads an entry that this launch
writes or waits for another. It knows neither windows nor who owns a block.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tcb.kernels.contract import TableEdits
from tcb.kernels.gpu.launch import Launch, start

_CONSTANTS = {"BLOCK_EDITS": 256, "BLOCK_TOKENS": 512, "BLOCK_COLUMNS": 128}


def edit(problem: TableEdits) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`page_tables` of a problem that was checked."""
    row, slot, block_tables = problem.row, problem.slot, problem.block_tables
    if slot is None:
        slot = row.new_empty(len(problem.tables), int(problem.query_start[-1]), dtype=torch.int64)
    if block_tables is None:
        block_tables = [
            row.new_empty(row.shape[0], width, dtype=torch.int32) for width in problem.widths
        ]
    results = slot, tuple(block_tables)
    launch = plan_launch(problem, *results)
    if launch.programs:
        start([launch], row)
    return results


def plan_launch(problem: TableEdits, slot: Tensor, block_tables: tuple[Tensor, ...]) -> Launch:
    """A group: one program a sequence, and one for the slots of no token."""
    tables, row = tuple(problem.tables), problem.row
    columns = tuple(table.shape[1] for table in tables)
    arguments = (
        tables,
        block_tables,
        columns,
        problem.new_block,
        problem.new_block_start,
        problem.first_new_page,
        row,
        problem.query_start,
        problem.context_len,
        slot,
        row.shape[0],
        slot.shape[1],
        problem.num_pages or max(columns, default=0),
        slot.stride(0),
    )
    constants = {"GROUPS": len(tables), "PAGE_SIZE": problem.page_size, **_CONSTANTS}
    return Launch(page_tables_kernel, len(tables) * (row.shape[0] + 1), arguments, constants)


class Row(NamedTuple):
    """A row of a table, the ring that its columns are, and the blocks that it gets.

    Logical page p lies in column p % columns. The blocks new_ptr[0 : num_new] go into the columns
    from first_new on, in the order of the ring.
    """

    ptr: tl.tensor
    columns: tl.tensor
    new_ptr: tl.tensor
    first_new: tl.tensor
    num_new: tl.tensor


# the small tensors are parts of one upload, so their alignment is that of chance
@triton.jit(
    do_not_specialize=["num_sequences", "num_slots", "num_pages", "stride_slot_group"],
    do_not_specialize_on_alignment=[
        "new_block_ptr",
        "new_block_start_ptr",
        "first_new_page_ptr",
        "row_ptr",
        "query_start_ptr",
        "context_len_ptr",
    ],
)
def page_tables_kernel(
    table_ptrs,
    block_table_ptrs,
    all_columns,
    new_block_ptr,
    new_block_start_ptr,
    first_new_page_ptr,
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

    table_row = tl.load(row_ptr + sequence).to(tl.int64)
    is_live = table_row >= 0
    entry = group * num_sequences + sequence
    first_new = tl.load(new_block_start_ptr + entry)
    num_new = tl.load(new_block_start_ptr + entry + 1) - first_new
    row = Row(
        choose(table_ptrs, group, GROUPS) + table_row * columns,
        columns,
        new_block_ptr + first_new,
        tl.load(first_new_page_ptr + entry) % columns,
        tl.where(is_live, num_new, 0),
    )

    start = 0
    while start < row.num_new:
        index = start + tl.arange(0, BLOCK_EDITS)
        live = index < row.num_new
        block = tl.load(row.new_ptr + index, mask=live)
        tl.store(row.ptr + (row.first_new + index) % columns, block, mask=live)
        start += BLOCK_EDITS

    width = tl.minimum(columns, num_pages)
    block_table_ptr = choose(block_table_ptrs, group, GROUPS) + sequence.to(tl.int64) * width
    start = 0
    while start < width:
        column = start + tl.arange(0, BLOCK_COLUMNS)
        live = column < width
        tl.store(block_table_ptr + column, read_entry(row, column, live & is_live), mask=live)
        start += BLOCK_COLUMNS

    num_tokens = tl.load(query_start_ptr + sequence + 1) - first
    context = tl.load(context_len_ptr + sequence)
    slot_ptr += first
    start = 0
    while start < num_tokens:
        token = start + tl.arange(0, BLOCK_TOKENS)
        live = (token < num_tokens) & (first + token < num_slots)
        position = context + token
        block = read_entry(row, position // PAGE_SIZE % columns, live & is_live)
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
def read_entry(row: Row, column, live):
    """The blocks in these columns of a row once its new ones are there; -1 where not live."""
    index = (column - row.first_new + row.columns) % row.columns
    is_new = index < row.num_new
    kept = tl.load(row.ptr + column, mask=live & (index >= row.num_new), other=-1)
    new = tl.load(row.new_ptr + index, mask=live & is_new, other=-1)
    return tl.where(is_new, new, kept)
