"""The Triton kernels of `paged_decode`: a program a part of a sequence, and the merge of parts.

A part leaves its sums un-normalised in fp32, with the maximum and the sum of weights of each row.
Knows nothing of devices or of tile choice.
"""

import triton
import triton.language as tl

from tcb.kernels.gpu.tile import add_sink, attend_tiles, divide, load_rows


@triton.jit
def plan_parts(
    context_len,
    window,
    HAS_WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
):
    """Return (first visible key, first tile, end tile, tiles a part, parts) of one sequence.

    What the window leaves, not the whole sequence, is cut into at most MAX_SPLITS parts of whole
    tiles, MIN_TILES or more; a sequence of nothing has one empty part.
    """
    first_key = tl.maximum(context_len - window, 0) if HAS_WINDOW else 0
    first_tile = first_key // BLOCK_N
    end_tile = tl.cdiv(context_len, BLOCK_N)
    tiles = end_tile - first_tile
    tiles_per_part = tl.maximum(tl.cdiv(tiles, MAX_SPLITS), MIN_TILES)
    parts = tl.maximum(tl.cdiv(tiles, tiles_per_part), 1)
    return first_key, first_tile, end_tile, tiles_per_part, parts


# the integers of a batch are parts of larger tensors, so their alignment is that of chance
@triton.jit(
    do_not_specialize=["columns", "window", "stride_table_sequence"],
    do_not_specialize_on_alignment=["block_table_ptr", "context_len_ptr"],
)
def paged_decode_kernel(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_table_ptr,
    context_len_ptr,
    sinks_ptr,
    out_ptr,
    part_total_ptr,
    part_max_ptr,
    part_sum_ptr,
    columns,
    window,
    factor,
    cap_in,
    cap_out,
    stride_query_sequence,
    stride_query_head,
    stride_key_cache_block,
    stride_key_cache_head,
    stride_value_cache_block,
    stride_value_cache_head,
    stride_table_sequence,
    stride_out_sequence,
    stride_out_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    STRIDE_KEY_CACHE_SLOT: tl.constexpr,
    STRIDE_VALUE_CACHE_SLOT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attend from BLOCK_M heads of one key-value head to one part of a sequence.

    A grid of sequences * MAX_SPLITS * KV_HEADS * cdiv(GROUP, BLOCK_M) programs. The only part of a
    sequence goes straight to out; of several, each goes to the fp32 scratch part_total
    [sequences * heads, MAX_SPLITS, VALUE_DIM], part_max and part_sum [.., MAX_SPLITS].
    """
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    program = tl.program_id(0)
    head_block = program % HEAD_BLOCKS
    head = (program // HEAD_BLOCKS % KV_HEADS).to(tl.int64)
    part = program // (HEAD_BLOCKS * KV_HEADS) % MAX_SPLITS
    sequence = (program // (HEAD_BLOCKS * KV_HEADS * MAX_SPLITS)).to(tl.int64)
    context_len = tl.load(context_len_ptr + sequence)
    first_key, first_tile, end_tile, tiles_per_part, parts = plan_parts(
        context_len, window, HAS_WINDOW, BLOCK_N, MAX_SPLITS, MIN_TILES
    )
    if part >= parts:
        return
    first_tile += part * tiles_per_part
    end_tile = tl.minimum(first_tile + tiles_per_part, end_tile)

    row = head_block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < GROUP
    query_head = head * GROUP + row
    query_row = query_ptr + (sequence * stride_query_sequence + query_head * stride_query_head)
    query = load_rows(query_row, inside, DIM, DIM_BLOCK, True)
    key_cache_ptr += head * stride_key_cache_head
    value_cache_ptr += head * stride_value_cache_head
    total, row_max, row_sum = attend_tiles(
        tl.zeros([BLOCK_M, VALUE_BLOCK], tl.float32),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        query,
        tl.zeros([BLOCK_M], tl.int32) + (context_len - 1),
        first_tile,
        end_tile,
        first_key,
        context_len,
        context_len,
        window,
        factor,
        cap_in,
        cap_out,
        key_cache_ptr,
        value_cache_ptr,
        block_table_ptr + sequence * stride_table_sequence,
        columns,
        stride_key_cache_block,
        stride_value_cache_block,
        0,
        0,
        DIM=DIM,
        VALUE_DIM=VALUE_DIM,
        STRIDE_KEY_CACHE_SLOT=STRIDE_KEY_CACHE_SLOT,
        STRIDE_VALUE_CACHE_SLOT=STRIDE_VALUE_CACHE_SLOT,
        STRIDE_KEY_TOKEN=0,
        STRIDE_VALUE_TOKEN=0,
        PAGE_SIZE=PAGE_SIZE,
        BLOCK_N=BLOCK_N,
        HAS_CHUNK=False,
        HAS_WINDOW=HAS_WINDOW,
        HAS_SOFTCAP=HAS_SOFTCAP,
        MASKED=True,
        UPCAST=UPCAST,
    )
    row_max *= factor
    column = tl.arange(0, VALUE_BLOCK)
    mask = inside[:, None] & (column < VALUE_DIM)[None, :]
    if parts == 1:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + query_head, mask=inside, other=0.0).to(tl.float32)
            total, row_sum = add_sink(total, row_max, row_sum, sink * 1.4426950408889634)
        out_row = out_ptr + (sequence * stride_out_sequence + query_head * stride_out_head)
        result = divide(total, row_sum).to(out_ptr.dtype.element_ty)
        tl.store(out_row[:, None] + column[None, :], result, mask=mask)
    else:
        part_row = (sequence * (KV_HEADS * GROUP) + query_head) * MAX_SPLITS + part
        tl.store(part_total_ptr + part_row[:, None] * VALUE_DIM + column[None, :], total, mask=mask)
        tl.store(part_max_ptr + part_row, row_max, mask=inside)
        tl.store(part_sum_ptr + part_row, row_sum, mask=inside)


@triton.jit(do_not_specialize=["window"], do_not_specialize_on_alignment=["context_len_ptr"])
def merge_parts_kernel(
    context_len_ptr,
    sinks_ptr,
    out_ptr,
    part_total_ptr,
    part_max_ptr,
    part_sum_ptr,
    window,
    stride_out_sequence,
    stride_out_head,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    MIN_TILES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merge the parts of one head of one sequence into out, and count its sink, once.

    A grid of sequences * HEADS programs; the sequences of one part are already in out.
    """
    CHUNK: tl.constexpr = 16
    program = tl.program_id(0).to(tl.int64)
    sequence = program // HEADS
    head = program % HEADS
    context_len = tl.load(context_len_ptr + sequence)
    _, _, _, _, parts = plan_parts(context_len, window, HAS_WINDOW, BLOCK_N, MAX_SPLITS, MIN_TILES)
    if parts == 1:
        return
    first_part = program * MAX_SPLITS
    part = tl.arange(0, SPLITS_BLOCK)
    part_max = tl.load(part_max_ptr + first_part + part, mask=part < parts, other=float("-inf"))
    top = tl.max(part_max, 0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    part_sum = tl.load(part_sum_ptr + first_part + part, mask=part < parts, other=0.0)
    row_sum = tl.sum(part_sum * tl.exp2(part_max - top), 0)
    if HAS_SINKS:
        row_sum += tl.exp2(sink - top)

    column = tl.arange(0, VALUE_BLOCK)
    total = tl.zeros([VALUE_BLOCK], tl.float32)
    for first in range(0, parts, CHUNK):
        some = first + tl.arange(0, CHUNK)
        inside = some < parts
        some_max = tl.load(part_max_ptr + first_part + some, mask=inside, other=float("-inf"))
        total_ptr = part_total_ptr + (first_part + some)[:, None] * VALUE_DIM + column[None, :]
        mask = inside[:, None] & (column < VALUE_DIM)[None, :]
        some_total = tl.load(total_ptr, mask=mask, other=0.0)
        total += tl.sum(some_total * tl.exp2(some_max - top)[:, None], 0)
    result = total / tl.where(row_sum == 0.0, 1.0, row_sum)
    out_row = out_ptr + (sequence * stride_out_sequence + head * stride_out_head)
    tl.store(out_row + column, result.to(out_ptr.dtype.element_ty), mask=column < VALUE_DIM)
