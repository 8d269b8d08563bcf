"""Write new keys and values into their slots of the paged cache: K and V of a batch in one launch.

    key_cache[slot // page_size, slot % page_size] = key      and so for value; slot < 0 is skipped

It does not know what a slot means to anybody, nor layers.
"""

import torch
import triton
import triton.language as tl

from tcb.kernels.checks import check_write_kv
from tcb.kernels.contract import Launch, start
from tcb.kernels.cpu import operations as torch_ops
from tcb.kernels.dispatch import use_triton

# elements of K, and as many of V, that one program copies
_TILE = 2048
# bytes that a warp copies at once, 16 a thread: a wider program would split them finer
_WARP_BYTES = 512


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot: torch.Tensor,
) -> None:
    """Store new keys and values in their slots; a negative slot is padding and is skipped.

    key, value    [tokens, kv_heads, dim | value_dim]
    key_cache     [blocks, page_size, kv_heads, dim]      value_cache  [..., value_dim]
    slot          [tokens] int64; no slot twice

    Writes both caches, in their dtype. Any strides with a dense last axis. Raises ValueError on a
    tensor whose shape, dtype, device or stride does not fit.
    """
    check_write_kv(key, value, key_cache, value_cache, slot)
    if not use_triton(key):
        torch_ops.write_kv(key, value, key_cache, value_cache, slot)
    elif slot.shape[0]:
        start(plan_launches(key, value, key_cache, value_cache, slot), key)


def plan_launches(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot: torch.Tensor,
) -> list[Launch]:
    """One program a token and block of heads."""
    tokens, heads, dim = key.shape
    value_dim = value.shape[2]
    block_dim, block_value_dim = triton.next_power_of_2(dim), triton.next_power_of_2(value_dim)
    fitting = max(1, _TILE // max(block_dim, block_value_dim))
    block_heads = min(triton.next_power_of_2(heads), fitting)
    head_blocks = triton.cdiv(heads, block_heads)
    tile_bytes = block_heads * min(block_dim, block_value_dim) * key.element_size()
    arguments = (
        key,
        value,
        key_cache,
        value_cache,
        slot,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
    )
    constants = {
        "PAGE_SIZE": key_cache.shape[1],
        "HEADS": heads,
        "DIM": dim,
        "VALUE_DIM": value_dim,
        "HEAD_BLOCKS": head_blocks,
        "BLOCK_HEADS": block_heads,
        "BLOCK_DIM": block_dim,
        "BLOCK_VALUE_DIM": block_value_dim,
        "num_warps": max(1, min(4, tile_bytes // _WARP_BYTES)),
    }
    return [Launch(write_kv_kernel, tokens * head_blocks, arguments, constants)]


# slots are a part of a larger tensor, so their alignment is that of chance
@triton.jit(do_not_specialize_on_alignment=["slot_ptr"])
def write_kv_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_ptr,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_key_cache_block,
    stride_key_cache_token,
    stride_key_cache_head,
    stride_value_cache_block,
    stride_value_cache_token,
    stride_value_cache_head,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
):
    """Program token * HEAD_BLOCKS + i: the heads from i * BLOCK_HEADS on of one token."""
    program = tl.program_id(0)
    token = (program // HEAD_BLOCKS).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    if slot >= 0:
        block = slot // PAGE_SIZE
        within = slot % PAGE_SIZE
        head = (program % HEAD_BLOCKS).to(tl.int64) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        copy_heads(
            key_ptr + token * stride_key_token,
            stride_key_head,
            key_cache_ptr + block * stride_key_cache_block + within * stride_key_cache_token,
            stride_key_cache_head,
            head,
            HEADS,
            DIM,
            BLOCK_DIM,
        )
        copy_heads(
            value_ptr + token * stride_value_token,
            stride_value_head,
            value_cache_ptr + block * stride_value_cache_block + within * stride_value_cache_token,
            stride_value_cache_head,
            head,
            HEADS,
            VALUE_DIM,
            BLOCK_VALUE_DIM,
        )


@triton.jit
def copy_heads(
    source_ptr,
    stride_source_head,
    target_ptr,
    stride_target_head,
    head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Copy heads [BLOCK_HEADS] of one token, cast to the dtype of the target."""
    lane = tl.arange(0, BLOCK_DIM)[None, :]
    row = head[:, None]
    live = (row < HEADS) & (lane < DIM)
    tile = tl.load(source_ptr + row * stride_source_head + lane, mask=live)
    place = target_ptr + row * stride_target_head + lane
    tl.store(place, tile.to(target_ptr.dtype.element_ty), mask=live)
