"""The Triton kernel of `paged_attention`: programs that walk a list of tiles of rows.

The query heads that share a key-value head are packed into the rows of a tile: row r of a sequence
is token r // GROUP, head r % GROUP. Knows nothing of devices or of tile choice.
"""

import triton
import triton.language as tl

from tcb.kernels.gpu.tile import add_sink, attend_tiles, divide, load_rows


@triton.jit
def distance(there_ptr, here_ptr, ALIGN: tl.constexpr):
    """Elements from here_ptr to there_ptr, a multiple of ALIGN."""
    BITS: tl.constexpr = here_ptr.dtype.element_ty.primitive_bitwidth
    elements = (there_ptr.to(tl.int64) - here_ptr.to(tl.int64)) // (BITS // 8)
    return tl.multiple_of(elements, ALIGN)


# the integers of a batch are parts of larger tensors, so their alignment is that of chance
@triton.jit(
    do_not_specialize=["count_ptr", "columns", "window", "stride_table_sequence"],
    do_not_specialize_on_alignment=["block_table_ptr", "query_start_ptr", "context_len_ptr"],
)
def paged_attention_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_table_ptr,
    query_start_ptr,
    context_len_ptr,
    sinks_ptr,
    out_ptr,
    item_ptr,
    count_ptr,
    columns,
    window,
    factor,
    cap_in,
    cap_out,
    stride_query_token,
    stride_query_head,
    stride_key_head,
    stride_value_head,
    stride_key_cache_block,
    stride_key_cache_head,
    stride_value_cache_block,
    stride_value_cache_head,
    stride_table_sequence,
    stride_out_token,
    stride_out_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    STRIDE_KEY_CACHE_SLOT: tl.constexpr,
    STRIDE_VALUE_CACHE_SLOT: tl.constexpr,
    STRIDE_KEY_TOKEN: tl.constexpr,
    STRIDE_VALUE_TOKEN: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ZONES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attend from every tile of a work list, for each key-value head, whatever the grid is.

    Program p of P serves the pairs (item, head) p, p + P, p + 2P, ... of the list. ZONES walks the
    tiles of keys between the left edge of the window and the diagonal without masks.
    """
    for work in tl.range(tl.program_id(0), tl.load(count_ptr) * KV_HEADS, tl.num_programs(0)):
        head = tl.cast(work % KV_HEADS, tl.int64)
        sequence = tl.load(item_ptr + work // KV_HEADS * 2)
        first_row = tl.load(item_ptr + work // KV_HEADS * 2 + 1) * BLOCK_M
        query_start = tl.load(query_start_ptr + sequence)
        rows = (tl.load(query_start_ptr + sequence + 1) - query_start) * GROUP
        context_len = tl.load(context_len_ptr + sequence)

        row = first_row + tl.arange(0, BLOCK_M)
        inside = row < rows
        token = (query_start + row // GROUP).to(tl.int64)
        query_head = head * GROUP + row % GROUP
        query_row = query_ptr + (token * stride_query_token + query_head * stride_query_head)
        query = load_rows(query_row, inside, DIM, DIM_BLOCK, True)
        first_position = context_len + first_row // GROUP
        last_position = context_len + tl.minimum(first_row + BLOCK_M - 1, rows - 1) // GROUP
        position = tl.minimum(context_len + row // GROUP, last_position)

        first_key = tl.maximum(first_position - window + 1, 0) if HAS_WINDOW else 0
        end_key = last_position + 1
        first_tile = first_key // BLOCK_N
        end_tile = tl.cdiv(end_key, BLOCK_N)
        # where the chunk's own keys and values would have the row of position 0 of the sequence
        chunk_origin = (query_start - context_len).to(tl.int64)
        head_keys_ptr = key_cache_ptr + head * stride_key_cache_head
        head_values_ptr = value_cache_ptr + head * stride_value_cache_head
        new_keys_ptr = key_ptr + (chunk_origin * STRIDE_KEY_TOKEN + head * stride_key_head)
        new_values_ptr = value_ptr + (chunk_origin * STRIDE_VALUE_TOKEN + head * stride_value_head)
        key_shift = distance(new_keys_ptr, head_keys_ptr, ALIGN)
        value_shift = distance(new_values_ptr, head_values_ptr, ALIGN)
        table_ptr = block_table_ptr + sequence.to(tl.int64) * stride_table_sequence

        total = tl.zeros([BLOCK_M, VALUE_BLOCK], tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        full_tile = first_tile
        edge_tile = first_tile
        if ZONES:
            # every row sees all of the tiles [full_tile, edge_tile)
            edge_tile = tl.maximum((first_position + 1) // BLOCK_N, first_tile)
            if HAS_WINDOW:
                full_tile = tl.cdiv(tl.maximum(last_position - window + 1, 0), BLOCK_N)
                full_tile = tl.minimum(tl.maximum(full_tile, first_tile), end_tile)
                edge_tile = tl.maximum(edge_tile, full_tile)
        for zone in tl.static_range(3):
            # 0: left edge of the window, 1: full, 2: diagonal
            if zone == 2 or (ZONES and (zone == 1 or HAS_WINDOW)):
                total, row_max, row_sum = attend_tiles(
                    total,
                    row_max,
                    row_sum,
                    query,
                    position,
                    first_tile if zone == 0 else (full_tile if zone == 1 else edge_tile),
                    full_tile if zone == 0 else (edge_tile if zone == 1 else end_tile),
                    first_key,
                    end_key,
                    context_len,
                    window,
                    factor,
                    cap_in,
                    cap_out,
                    head_keys_ptr,
                    head_values_ptr,
                    table_ptr,
                    columns,
                    stride_key_cache_block,
                    stride_value_cache_block,
                    key_shift,
                    value_shift,
                    DIM=DIM,
                    VALUE_DIM=VALUE_DIM,
                    STRIDE_KEY_CACHE_SLOT=STRIDE_KEY_CACHE_SLOT,
                    STRIDE_VALUE_CACHE_SLOT=STRIDE_VALUE_CACHE_SLOT,
                    STRIDE_KEY_TOKEN=STRIDE_KEY_TOKEN,
                    STRIDE_VALUE_TOKEN=STRIDE_VALUE_TOKEN,
                    PAGE_SIZE=PAGE_SIZE,
                    BLOCK_N=BLOCK_N,
                    HAS_CHUNK=True,
                    HAS_WINDOW=HAS_WINDOW,
                    HAS_SOFTCAP=HAS_SOFTCAP,
                    MASKED=zone != 1,
                    UPCAST=UPCAST,
                )
        # rows and heads anew, from a value that the compiler cannot know: kept for the epilogue
        # they would hold up to 57 registers a thread through the loops (sm_80, head size 256)
        row += tl.load(query_start_ptr + sequence, volatile=True) - query_start
        inside = row < rows
        token = (query_start + row // GROUP).to(tl.int64)
        query_head = head * GROUP + row % GROUP
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + query_head).to(tl.float32) * 1.4426950408889634
            total, row_sum = add_sink(total, row_max * factor, row_sum, sink)
        out_row = out_ptr + (token * stride_out_token + query_head * stride_out_head)
        column = tl.arange(0, VALUE_BLOCK)
        tl.store(
            out_row[:, None] + column[None, :],
            divide(total, row_sum).to(out_ptr.dtype.element_ty),
            mask=inside[:, None] & (column < VALUE_DIM)[None, :],
        )
