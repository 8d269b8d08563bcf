"""The Triton kernel of `paged_attention`: a program a tile of rows of one key-value head.

The query heads that share a key-value head are packed into the rows of a tile: row r of a sequence
is token r // GROUP, head r % GROUP. Knows nothing of devices or of tile choice.
"""

import triton
import triton.language as tl

from tcb.kernels.attention_tile import add_sink, attend_tiles, divide, load_rows


@triton.jit
def find_sequence(tile, query_start_ptr, num_sequences, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return (sequence, tile within it) of a tile of the grid; the sequence is -1 before the first.

    Sequence i owns the tiles from start(i) = rows before it // BLOCK_M + i on. That is never fewer
    than it needs, as floor((a + b) / M) + 1 - floor(a / M) >= ceil(b / M), grows strictly, and
    needs no prefix sum. So the sequence of a tile is the number of starts up to it, less one.
    """
    LANES: tl.constexpr = 256
    found = 0
    for first in range(0, num_sequences, LANES):
        index = first + tl.arange(0, LANES)
        inside = index < num_sequences
        before = tl.load(query_start_ptr + index, mask=inside, other=0)
        start = before * GROUP // BLOCK_M + index
        found += tl.sum((inside & (start <= tile)).to(tl.int32), 0)
    sequence = found - 1
    before = tl.load(query_start_ptr + tl.maximum(sequence, 0))
    return sequence, tile - (before * GROUP // BLOCK_M + sequence)


@triton.jit
def distance(there_ptr, here_ptr, ALIGN: tl.constexpr):
    """Elements from here_ptr to there_ptr, a multiple of ALIGN."""
    BITS: tl.constexpr = here_ptr.dtype.element_ty.primitive_bitwidth
    elements = (there_ptr.to(tl.int64) - here_ptr.to(tl.int64)) // (BITS // 8)
    return tl.multiple_of(elements, ALIGN)


@triton.jit(
    do_not_specialize=["num_sequences", "num_tiles", "columns", "window", "stride_table_sequence"]
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
    num_sequences,
    num_tiles,
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
    MIN_ROWS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    ZONES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Serve sequences of MIN_ROWS..MAX_ROWS rows, a tile each; MAX_ROWS 0: all from MIN_ROWS on.

    ZONES walks the tiles between the left edge of the window and the diagonal without masks.
    A grid of num_tiles * KV_HEADS programs; the last tiles, with most keys before them, go first.
    """
    program = tl.program_id(0)
    head = (program % KV_HEADS).to(tl.int64)
    tile = num_tiles - 1 - program // KV_HEADS
    if MAX_ROWS > 0:
        sequence, tile = tile, 0
    else:
        sequence, tile = find_sequence(tile, query_start_ptr, num_sequences, GROUP, BLOCK_M)
    if sequence < 0:
        return
    query_start = tl.load(query_start_ptr + sequence)
    query_len = tl.load(query_start_ptr + sequence + 1) - query_start
    rows = query_len * GROUP
    first_row = tile * BLOCK_M
    if first_row >= rows or rows < MIN_ROWS:
        return
    if MAX_ROWS > 0 and rows > MAX_ROWS:
        return
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
    key_cache_ptr += head * stride_key_cache_head
    value_cache_ptr += head * stride_value_cache_head
    key_ptr += chunk_origin * STRIDE_KEY_TOKEN + head * stride_key_head
    value_ptr += chunk_origin * STRIDE_VALUE_TOKEN + head * stride_value_head
    key_shift = distance(key_ptr, key_cache_ptr, ALIGN)
    value_shift = distance(value_ptr, value_cache_ptr, ALIGN)
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
                key_cache_ptr,
                value_cache_ptr,
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
    # rows and heads anew, from a value that the compiler cannot know: kept for the epilogue they
    # would hold up to 57 registers a thread through the loops (sm_80, head size 256)
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
