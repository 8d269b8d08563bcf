"""Write new keys and values into their slots of the paged cache: K and V of a batch in one launch.

key_cache[slot // page_size, slot % page_size] = key      and so for value; slot < 0 is skipped
"""

import triton
import triton.language as tl

from tcb.kernels.contract import KVWrite
from tcb.kernels.gpu.launch import Cache, Launch, Rows, Width, ceil_div, power_of_2, start

# elements of K, and as many of V, that one program copies
_TILE = 2048
# bytes that a warp copies at once, 16 a thread: a wider program would split them finer
_WARP_BYTES = 512


def write(problem: KVWrite) -> None:
    """`write_kv` of a problem that was checked."""
    if problem.slot.shape[0]:
        start([plan_launch(problem)], problem.key)


def plan_launch(problem: KVWrite) -> Launch:
    """One program a token and block of heads."""
    key, value, key_cache, value_cache, slot = problem
    tokens, heads, dim = key.shape
    widths = [Width(width, power_of_2(width)) for width in (dim, value.shape[2])]
    blocks = [width.block for width in widths]
    block_heads = min(power_of_2(heads), max(1, _TILE // max(blocks)))
    head_blocks = ceil_div(heads, block_heads)
    tile_bytes = block_heads * min(blocks) * key.element_size()
    tensors = Rows.of(key), Rows.of(value), Cache.of(key_cache), Cache.of(value_cache)
    constants = {
        "KEYS": widths[0],
        "VALUES": widths[1],
        "PAGE_SIZE": key_cache.shape[1],
        "HEADS": heads,
        "HEAD_BLOCKS": head_blocks,
        "BLOCK_HEADS": block_heads,
        "num_warps": max(1, min(4, tile_bytes // _WARP_BYTES)),
    }
    return Launch(write_kv_kernel, tokens * head_blocks, (*tensors, slot), constants)


# slots are a part of a larger tensor, so their alignment is that of chance
@triton.jit(do_not_specialize_on_alignment=["slot_ptr"])
def write_kv_kernel(
    key: Rows,
    value: Rows,
    key_cache: Cache,
    value_cache: Cache,
    slot_ptr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """Program token * HEAD_BLOCKS + i: the heads from i * BLOCK_HEADS on of one token."""
    program = tl.program_id(0)
    token = (program // HEAD_BLOCKS).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    if slot >= 0:
        block = slot // PAGE_SIZE
        within = slot % PAGE_SIZE
        head = (program % HEAD_BLOCKS).to(tl.int64) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        copy_heads(key, token, key_cache, block, within, head, HEADS, KEYS)
        copy_heads(value, token, value_cache, block, within, head, HEADS, VALUES)


@triton.jit
def copy_heads(
    rows: Rows,
    token,
    cache: Cache,
    block,
    within,
    head,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Copy heads [BLOCK_HEADS] of one token into a slot, cast to the dtype of the cache."""
    lane = tl.arange(0, WIDTH.block)[None, :]
    row = head[:, None]
    live = (row < HEADS) & (lane < WIDTH.dim)
    token_ptr = rows.ptr + token * rows.stride_token
    slot_ptr = cache.ptr + block * cache.stride_block + within * cache.stride_slot
    tile = tl.load(token_ptr + row * rows.stride_head + lane, mask=live)
    place = slot_ptr + row * cache.stride_head + lane
    tl.store(place, tile.to(cache.ptr.dtype.element_ty), mask=live)
