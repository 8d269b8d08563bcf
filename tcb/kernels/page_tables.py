"""Edit a layer group's block tables and find every new token's slot, on the device.

    table[row, column] = block                                             for every edit, then
    position = context_len[i] + index in the chunk                         for every new token
    slot     = table[row[i], position // page_size % columns] * page_size + position % page_size
    block_table[i] = table[row[i]]

A row is a ring over its columns, so a sliding group whose next page falls on its oldest recycles it
with no edit. Two launches: all edits are in place before an entry is read. It knows neither windows
nor who owns a block.
"""

import torch
import triton
import triton.language as tl

from tcb.kernels import torch_ops
from tcb.kernels.attention_contract import Launch, start
from tcb.kernels.checks import check_page_tables, expect
from tcb.kernels.dispatch import use_triton

_BLOCK_EDITS = 256
_BLOCK_TOKENS = 512
_BLOCK_COLUMNS = 128


def page_tables(
    table: torch.Tensor,
    edit: torch.Tensor,
    row: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    page_size: int,
    *,
    num_columns: int | None = None,
    slot: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the edits into `table`; return every new token's slot and the batch's block table.

    table        [rows, columns] int32, written; -1 where there is no block
    edit         [edits, 3] int32, (row, column, block); no entry twice, a negative row is padding
    row          [sequences] int32 or int64, a row of `table`; a negative one is padding
    query_start  [sequences + 1] int32         context_len  [sequences] int32
    num_columns  columns of the result, all by default; fewer only where no page wraps

    slot         [tokens] int64, block * page_size + position % page_size; -1 without a block
    block_table  [sequences, num_columns] int32

    `slot` and `block_table` are written in place where given; a `slot` longer than the batch ends
    in -1. Without `slot` the host waits for the number of tokens, the last of `query_start`.
    Raises ValueError on a tensor whose shape, dtype, device or stride does not fit.
    """
    check_page_tables(table, edit, row, query_start, context_len, page_size, num_columns)
    device, sequences = table.device, row.shape[0]
    if num_columns is None:
        num_columns = table.shape[1]
    if slot is None:
        slot = torch.empty(int(query_start[-1]), dtype=torch.int64, device=device)
    if block_table is None:
        block_table = torch.empty((sequences, num_columns), dtype=torch.int32, device=device)
    expect("slot", slot, (None,), device=device, dtype=torch.int64)
    shape = (sequences, num_columns)
    expect("block_table", block_table, shape, device=device, dtype=torch.int32)
    tensors = table, edit, row, query_start, context_len
    if use_triton(table):
        start(plan_launches(*tensors, slot, block_table, page_size), table)
    else:
        torch_ops.page_tables(*tensors, page_size, slot=slot, block_table=block_table)
    return slot, block_table


def plan_launches(
    table: torch.Tensor,
    edit: torch.Tensor,
    row: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    slot: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
) -> list[Launch]:
    """The edits, if any; then one program a sequence and one for the slots of no token."""
    launches = []
    num_edits, (sequences, num_columns) = edit.shape[0], block_table.shape
    if num_edits:
        programs = triton.cdiv(num_edits, _BLOCK_EDITS)
        arguments = table, edit, num_edits, table.stride(0), edit.stride(0)
        launches.append(
            Launch(edit_table_kernel, programs, arguments, {"BLOCK_EDITS": _BLOCK_EDITS})
        )
    arguments = (
        table,
        row,
        query_start,
        context_len,
        slot,
        block_table,
        sequences,
        slot.shape[0],
        table.shape[1],
        num_columns,
        table.stride(0),
        block_table.stride(0),
    )
    constants = {
        "PAGE_SIZE": page_size,
        "BLOCK_TOKENS": _BLOCK_TOKENS,
        "BLOCK_COLUMNS": _BLOCK_COLUMNS,
    }
    return [*launches, Launch(find_slots_kernel, sequences + 1, arguments, constants)]


@triton.jit
def edit_table_kernel(
    table_ptr, edit_ptr, num_edits, stride_table_row, stride_edit, BLOCK_EDITS: tl.constexpr
):
    """Program i writes the edits from i * BLOCK_EDITS on."""
    index = tl.program_id(0).to(tl.int64) * BLOCK_EDITS + tl.arange(0, BLOCK_EDITS)
    live = index < num_edits
    row = tl.load(edit_ptr + index * stride_edit, mask=live, other=-1).to(tl.int64)
    column = tl.load(edit_ptr + index * stride_edit + 1, mask=live, other=0).to(tl.int64)
    block = tl.load(edit_ptr + index * stride_edit + 2, mask=live, other=0)
    tl.store(table_ptr + row * stride_table_row + column, block, mask=live & (row >= 0))


@triton.jit
def find_slots_kernel(
    table_ptr,
    row_ptr,
    query_start_ptr,
    context_len_ptr,
    slot_ptr,
    block_table_ptr,
    num_sequences,
    num_slots,
    table_columns,
    num_columns,
    stride_table_row,
    stride_block_table_row,
    PAGE_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Program i serves sequence i; the one behind the last writes -1 from the last token on."""
    sequence = tl.program_id(0).to(tl.int64)
    first = tl.load(query_start_ptr + sequence).to(tl.int64)
    end = first * 0 + num_slots
    row = first * 0 - 1
    context = first * 0
    if sequence < num_sequences:
        end = tl.load(query_start_ptr + sequence + 1).to(tl.int64)
        row = tl.load(row_ptr + sequence).to(tl.int64)
        context = tl.load(context_len_ptr + sequence).to(tl.int64)
        start_column = 0
        while start_column < num_columns:
            column = start_column + tl.arange(0, BLOCK_COLUMNS)
            live = column < num_columns
            # a negative row reads nothing; the sum makes a block of the scalar comparison
            known = live & (column * 0 + row >= 0)
            entry = tl.load(table_ptr + row * stride_table_row + column, mask=known, other=-1)
            tl.store(block_table_ptr + sequence * stride_block_table_row + column, entry, mask=live)
            start_column += BLOCK_COLUMNS
    start = first
    while start < end:
        token = start + tl.arange(0, BLOCK_TOKENS)
        live = token < end
        position = context + token - first
        column = position // PAGE_SIZE % table_columns
        known = live & (column * 0 + row >= 0)
        entry = tl.load(table_ptr + row * stride_table_row + column, mask=known, other=-1)
        block = entry.to(tl.int64)
        slot = tl.where(block < 0, -1, block * PAGE_SIZE + position % PAGE_SIZE)
        tl.store(slot_ptr + token, slot, mask=live)
        start += BLOCK_TOKENS
