"""The walk of one tile of query rows over tiles of keys and values: an online softmax in base 2.

    s  = q k^T                   with a softcap c: s = c * tanh(scale * q k^T / c)
    m' = max(m, max s)           p  = 2^(factor * (s - m'))        d = 2^(factor * (m - m'))
    l' = l * d + sum p           o' = o * d + p v                  result = o / l

factor is scale * log2(e). Key tiles lie on absolute multiples of their width, so a row meets its
keys in the same tiles however its sequence was cut into chunks. Knows nothing of programs, of
sequences or of splits: a caller hands in one sequence and one key-value head.
"""

import triton
import triton.language as tl


@triton.jit
def load_rows(row_ptr, live, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """[rows, BLOCK] from one pointer a row; columns past WIDTH and, if MASKED, dead rows are 0."""
    column = tl.arange(0, BLOCK)
    element_ptr = row_ptr[:, None] + column[None, :]
    if MASKED:
        if BLOCK != WIDTH:
            return tl.load(element_ptr, mask=live[:, None] & (column < WIDTH)[None, :], other=0.0)
        return tl.load(element_ptr, mask=live[:, None], other=0.0)
    if BLOCK != WIDTH:
        return tl.load(element_ptr, mask=(column < WIDTH)[None, :], other=0.0)
    return tl.load(element_ptr)


@triton.jit
def load_blocks(table_ptr, position, columns, PAGE_SIZE: tl.constexpr, RING: tl.constexpr):
    """Block ids of the pages of `position`; past the end of the table any entry is returned."""
    page = position // PAGE_SIZE
    column = page % columns if RING else tl.minimum(page, columns - 1)
    return tl.load(table_ptr + column)


@triton.jit
def attend_tiles(
    total,
    row_max,
    row_sum,
    query,
    position,
    first_tile,
    end_tile,
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
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    STRIDE_KEY_CACHE_SLOT: tl.constexpr,
    STRIDE_VALUE_CACHE_SLOT: tl.constexpr,
    STRIDE_KEY_TOKEN: tl.constexpr,
    STRIDE_VALUE_TOKEN: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Fold key tiles [first_tile, end_tile) into (total, row_max, row_sum); return the three.

    Keys at positions below context_len come from the pages; with HAS_CHUNK the key of a later
    position j is key_shift + j * STRIDE_KEY_TOKEN elements behind key_cache_ptr, and its value
    likewise: offsets of one pointer, as AMD's compiler cannot choose between pointers.

    MASKED hides what a row must not see, and loads nothing outside [first_key, end_key), the
    positions that some row sees; without it every row must see every key of the tiles. Strides
    along the rows of a tile are constants: as arguments they cost a wide tile of sm_90 about 20
    registers a thread.
    """
    DIM_BLOCK: tl.constexpr = query.shape[1]
    VALUE_BLOCK: tl.constexpr = total.shape[1]
    # one page holds the whole tile: its block id is a scalar
    ONE_PAGE: tl.constexpr = PAGE_SIZE % BLOCK_N == 0
    lane = tl.arange(0, BLOCK_N)
    lookup = 0 if ONE_PAGE else lane
    # the id for the next tile is fetched one tile ahead: a load whose address hangs on a load of
    # the same iteration halves the depth of the software pipeline
    next_block = load_blocks(
        table_ptr, first_tile * BLOCK_N + lookup, columns, PAGE_SIZE, HAS_WINDOW
    )
    for tile in tl.range(first_tile, end_tile):
        start = tile * BLOCK_N
        key_position = start + lane
        block = next_block.to(tl.int64)
        next_block = load_blocks(
            table_ptr, start + BLOCK_N + lookup, columns, PAGE_SIZE, HAS_WINDOW
        )
        slot = ((start % PAGE_SIZE) + lane if ONE_PAGE else key_position % PAGE_SIZE).to(tl.int64)
        key_offset = block * stride_key_cache_block + slot * STRIDE_KEY_CACHE_SLOT
        value_offset = block * stride_value_cache_block + slot * STRIDE_VALUE_CACHE_SLOT
        if HAS_CHUNK:
            cached = key_position < context_len
            row = key_position.to(tl.int64)
            key_offset = tl.where(cached, key_offset, key_shift + row * STRIDE_KEY_TOKEN)
            value_offset = tl.where(cached, value_offset, value_shift + row * STRIDE_VALUE_TOKEN)
        live = (key_position >= first_key) & (key_position < end_key)
        keys = load_rows(key_cache_ptr + key_offset, live, DIM, DIM_BLOCK, MASKED)
        values = load_rows(value_cache_ptr + value_offset, live, VALUE_DIM, VALUE_BLOCK, MASKED)

        if UPCAST:
            score = tl.dot(query.to(tl.float32), tl.trans(keys.to(tl.float32)))
        else:
            score = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if HAS_SOFTCAP:
            # c * tanh(x) = c * (1 - 2 / (1 + e^2x)): saturates at either sign, never inf / inf
            score = cap_out * (1.0 - 2.0 / (1.0 + tl.exp2(score * cap_in)))
        if MASKED:
            seen = key_position[None, :] <= position[:, None]
            if HAS_WINDOW:
                seen &= key_position[None, :] > position[:, None] - window
            score = tl.where(seen, score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1))
        # a row that has seen nothing yet has the maximum -inf, and -inf - -inf is NaN
        top = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weight = tl.exp2(score * factor - (top * factor)[:, None])
        # exactly 1 while the maximum stays, so that a tile hidden from a row leaves no trace in it:
        # the difference of two products is not, once a compiler fuses one of them with it
        decay = tl.exp2((row_max - top) * factor)
        row_sum = row_sum * decay + tl.sum(weight, 1)
        total = total * decay[:, None]
        weight = weight.to(values.dtype)
        if UPCAST:
            total = tl.dot(weight.to(tl.float32), values.to(tl.float32), total)
        else:
            total = tl.dot(weight, values, total, input_precision="ieee")
        row_max = new_max
    return total, row_max, row_sum


@triton.jit
def add_sink(total, row_max, row_sum, sink):
    """Count one more logit a row, `sink`, in the denominator; all but `total` in units of 2^x."""
    new_max = tl.maximum(row_max, sink)
    new_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    decay = tl.exp2(row_max - new_max)
    return total * decay[:, None], row_sum * decay + tl.exp2(sink - new_max)


@triton.jit
def divide(total, row_sum):
    """total / row_sum; a row that saw nothing is 0."""
    return total / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
