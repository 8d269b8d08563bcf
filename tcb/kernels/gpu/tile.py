"""The walk of one tile of query rows over tiles of keys and values: an online softmax in base 2.

    s  = q k^T                   with a softcap c: s = c * tanh(scale * q k^T / c)
    m' = max(m, max s)           p  = 2^(factor * (s - m'))        d = 2^(factor * (m - m'))
    l' = l * d + sum p           o' = o * d + p v                  result = o / l

factor is scale * log2(e). Key tiles lie on absolute multiples of their width, so a row meets its
keys in the same tiles however its sequence was cut into chunks. Knows nothing of programs, of
sequences or of splits: a caller hands in one sequence and one key-value head.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tcb.kernels.contract import AttentionOptions
from tcb.kernels.gpu.launch import power_of_2
from tcb.kernels.gpu.tuning import DeviceFacts

_LOG2_E = math.log2(math.e)


class Factors(NamedTuple):
    """Scalars of the base-2 softmax of raw products x = q k^T: weights are 2^(s * score).

    s = x without a softcap; with one, s = cap_out * tanh(x * cap_in * ln(2) / 2).
    """

    score: float
    cap_in: float
    cap_out: float


class Has(NamedTuple):
    """Which of its options a call has, and whether bf16 products are taken in fp32."""

    window: bool
    softcap: bool
    sinks: bool
    upcast: bool


class Softmax(NamedTuple):
    """What the keys so far sum up to: weighted values, the highest score, the weights."""

    total: tl.tensor
    row_max: tl.tensor
    row_sum: tl.tensor


class Pages(NamedTuple):
    """One sequence's row of the block table; logical page p is in column p % columns."""

    ptr: tl.tensor
    columns: tl.tensor


class Source(NamedTuple):
    """Keys or values of one head: where page 0 of block 0 lies, and the chunk's own behind it.

    The row of a later position j is chunk_shift + j * stride_token elements behind ptr: offsets of
    one pointer, as AMD's compiler cannot choose between pointers.
    """

    ptr: tl.tensor
    stride_block: tl.tensor
    chunk_shift: tl.tensor


def fold_options(
    options: AttentionOptions, query: torch.Tensor, facts: DeviceFacts
) -> tuple[Factors, Has]:
    """Fold scale (dim**-0.5 by default), softcap and log2(e) into what the kernels take."""
    _, softcap, sinks, scale = options
    upcast = facts.name == "interpreter" and query.dtype == torch.bfloat16
    has = Has(options.window is not None, softcap is not None, sinks is not None, upcast)
    scale = query.shape[2] ** -0.5 if scale is None else scale
    if softcap is None:
        return Factors(scale * _LOG2_E, 0.0, 0.0), has
    return Factors(1.0, 2.0 * _LOG2_E * scale / softcap, softcap * _LOG2_E), has


def block_width(width: int) -> int:
    """The power of two, at least 16 as matrix units want it, that holds a head of this size."""
    return max(16, power_of_2(width))


@triton.jit
def load_rows(row_ptr, live, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """[rows, WIDTH.block] from one pointer a row; 0 past WIDTH.dim and, if MASKED, in dead rows."""
    column = tl.arange(0, WIDTH.block)
    element_ptr = row_ptr[:, None] + column[None, :]
    if MASKED:
        if WIDTH.block != WIDTH.dim:
            mask = live[:, None] & (column < WIDTH.dim)[None, :]
            return tl.load(element_ptr, mask=mask, other=0.0)
        return tl.load(element_ptr, mask=live[:, None], other=0.0)
    if WIDTH.block != WIDTH.dim:
        return tl.load(element_ptr, mask=(column < WIDTH.dim)[None, :], other=0.0)
    return tl.load(element_ptr)


@triton.jit
def load_blocks(pages: Pages, position, PAGE_SIZE: tl.constexpr, RING: tl.constexpr):
    """Block ids of the pages of `position`; past the end of the table any entry is returned."""
    page = position // PAGE_SIZE
    column = page % pages.columns if RING else tl.minimum(page, pages.columns - 1)
    return tl.load(pages.ptr + column)


@triton.jit
def no_keys(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums of a tile of rows that has seen nothing."""
    return Softmax(
        tl.zeros([ROWS, COLUMNS], tl.float32),
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
    )


@triton.jit
def attend_tiles(
    so_far: Softmax,
    query,
    position,
    first_tile,
    end_tile,
    first_key,
    end_key,
    context_len,
    window,
    factors: Factors,
    keys: Source,
    values: Source,
    pages: Pages,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold key tiles [first_tile, end_tile) into so_far; return the new sums.

    Keys at positions below context_len come from the pages, those of later ones, with HAS_CHUNK,
    from the chunk.

    MASKED hides what a row must not see, and loads nothing outside [first_key, end_key), the
    positions that some row sees; without it every row must see every key of the tiles. Strides
    along the rows of a tile are constants: as arguments they cost a wide tile of sm_90 about 20
    registers a thread.
    """
    total, row_max, row_sum = so_far
    # one page holds the whole tile: its block id is a scalar
    ONE_PAGE: tl.constexpr = PAGE_SIZE % BLOCK_N == 0
    lane = tl.arange(0, BLOCK_N)
    lookup = 0 if ONE_PAGE else lane
    # the id for the next tile is fetched one tile ahead: a load whose address hangs on a load of
    # the same iteration halves the depth of the software pipeline
    next_block = load_blocks(pages, first_tile * BLOCK_N + lookup, PAGE_SIZE, HAS.window)
    for tile in tl.range(first_tile, end_tile):
        start = tile * BLOCK_N
        key_position = start + lane
        block = next_block.to(tl.int64)
        next_block = load_blocks(pages, start + BLOCK_N + lookup, PAGE_SIZE, HAS.window)
        slot = ((start % PAGE_SIZE) + lane if ONE_PAGE else key_position % PAGE_SIZE).to(tl.int64)
        key_offset = block * keys.stride_block + slot * KEYS.stride_slot
        value_offset = block * values.stride_block + slot * VALUES.stride_slot
        if HAS_CHUNK:
            cached = key_position < context_len
            row = key_position.to(tl.int64)
            # each is chosen before the next is computed: both computed first cost a narrow tile of
            # sm_90 30 registers a thread
            own = keys.chunk_shift + row * KEYS.stride_token
            key_offset = tl.where(cached, key_offset, own)
            own = values.chunk_shift + row * VALUES.stride_token
            value_offset = tl.where(cached, value_offset, own)
        live = (key_position >= first_key) & (key_position < end_key)
        key = load_rows(keys.ptr + key_offset, live, KEYS, MASKED)
        value = load_rows(values.ptr + value_offset, live, VALUES, MASKED)

        if HAS.upcast:
            score = tl.dot(query.to(tl.float32), tl.trans(key.to(tl.float32)))
        else:
            score = tl.dot(query, tl.trans(key), input_precision="ieee")
        if HAS.softcap:
            # c * tanh(x) = c * (1 - 2 / (1 + e^2x)): saturates at either sign, never inf / inf
            score = factors.cap_out * (1.0 - 2.0 / (1.0 + tl.exp2(score * factors.cap_in)))
        if MASKED:
            seen = key_position[None, :] <= position[:, None]
            if HAS.window:
                seen &= key_position[None, :] > position[:, None] - window
            score = tl.where(seen, score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1))
        # a row that has seen nothing yet has the maximum -inf, and -inf - -inf is NaN
        top = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weight = tl.exp2(score * factors.score - (top * factors.score)[:, None])
        # exactly 1 while the maximum stays, so that a tile hidden from a row leaves no trace in it:
        # the difference of two products is not, once a compiler fuses one of them with it
        decay = tl.exp2((row_max - top) * factors.score)
        row_sum = row_sum * decay + tl.sum(weight, 1)
        total = total * decay[:, None]
        weight = weight.to(value.dtype)
        if HAS.upcast:
            total = tl.dot(weight.to(tl.float32), value.to(tl.float32), total)
        else:
            total = tl.dot(weight, value, total, input_precision="ieee")
        row_max = new_max
    return Softmax(total, row_max, row_sum)


@triton.jit
def add_sink(total, row_max, row_sum, sink):
    """Return (total, row_sum) with one more logit a row, `sink`, in the denominator.

    row_max and sink are in units of 2^x.
    """
    new_max = tl.maximum(row_max, sink)
    new_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    decay = tl.exp2(row_max - new_max)
    return total * decay[:, None], row_sum * decay + tl.exp2(sink - new_max)


@triton.jit
def divide(total, row_sum):
    """total / row_sum; a row that saw nothing is 0."""
    return total / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
