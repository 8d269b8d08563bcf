"""Copy whole blocks of the pool: within it for forks, out of it and back for offload.

    copy_blocks     cache[target[i]] = cache[source[i]]
    gather_blocks   out[i] = cache[block[i]]
    scatter_blocks  cache[block[i]] = data[i]

One kernel for the three: a missing list of blocks stands for 0, 1, 2, ... A block is a row of
elements; it knows neither pages nor layers.
"""

import torch
import triton
import triton.language as tl

from tcb.kernels.checks import check_move_blocks
from tcb.kernels.contract import Launch, start
from tcb.kernels.cpu import operations as torch_ops
from tcb.kernels.dispatch import use_triton

# bytes that one program of 4 warps copies: four times 16 bytes a thread, so that loads overlap
_TILE_BYTES = 8192


def copy_blocks(cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """cache[target[i]] = cache[source[i]]; source[i] == target[i] changes nothing.

    cache           [blocks, elements], any dtype, dense last axis
    source, target  [pairs] int64; no target twice, and no block both read and written by two pairs

    Writes cache. Raises ValueError on a tensor whose shape, dtype, device or stride does not fit.
    """
    check_move_blocks(cache, None, "", source=source, target=target)
    if use_triton(cache):
        start(plan_launches(cache, source, cache, target), cache)
    else:
        torch_ops.copy_blocks(cache, source, target)


def gather_blocks(cache: torch.Tensor, block: torch.Tensor, out: torch.Tensor) -> None:
    """out[i] = cache[block[i]].

    cache  [blocks, elements]     block  [count] int64     out  [count, elements]

    Writes out. Raises ValueError on a tensor whose shape, dtype, device or stride does not fit.
    """
    check_move_blocks(cache, out, "out", block=block)
    if use_triton(cache):
        start(plan_launches(cache, block, out, None), cache)
    else:
        torch_ops.gather_blocks(cache, block, out)


def scatter_blocks(data: torch.Tensor, cache: torch.Tensor, block: torch.Tensor) -> None:
    """cache[block[i]] = data[i].

    data  [count, elements]     cache  [blocks, elements]     block  [count] int64, none twice

    Writes cache. Raises ValueError on a tensor whose shape, dtype, device or stride does not fit.
    """
    check_move_blocks(cache, data, "data", block=block)
    if use_triton(cache):
        start(plan_launches(data, None, cache, block), cache)
    else:
        torch_ops.scatter_blocks(data, cache, block)


def plan_launches(
    source: torch.Tensor,
    source_block: torch.Tensor | None,
    target: torch.Tensor,
    target_block: torch.Tensor | None,
) -> list[Launch]:
    """One program a pair of blocks and tile of their elements."""
    pairs = (target_block if source_block is None else source_block).shape[0]
    elements, block_elements = source.shape[1], _TILE_BYTES // source.element_size()
    tiles = triton.cdiv(elements, block_elements)
    if not pairs * tiles:
        return []
    strides = source.stride(0), target.stride(0)
    arguments = source, source_block, target, target_block, elements, tiles, *strides
    return [
        Launch(move_blocks_kernel, pairs * tiles, arguments, {"BLOCK_ELEMENTS": block_elements})
    ]


@triton.jit(do_not_specialize_on_alignment=["source_block_ptr", "target_block_ptr"])
def move_blocks_kernel(
    source_ptr,
    source_block_ptr,
    target_ptr,
    target_block_ptr,
    num_elements,
    num_tiles,
    stride_source_block,
    stride_target_block,
    BLOCK_ELEMENTS: tl.constexpr,
):
    """Program pair * num_tiles + i copies tile i of a pair of blocks."""
    program = tl.program_id(0)
    pair = (program // num_tiles).to(tl.int64)
    source_block = pair
    if source_block_ptr is not None:
        source_block = tl.load(source_block_ptr + pair)
    target_block = pair
    if target_block_ptr is not None:
        target_block = tl.load(target_block_ptr + pair)
    first = (program % num_tiles).to(tl.int64) * BLOCK_ELEMENTS
    element = first + tl.arange(0, BLOCK_ELEMENTS)
    live = element < num_elements
    tile = tl.load(source_ptr + source_block * stride_source_block + element, mask=live)
    tl.store(target_ptr + target_block * stride_target_block + element, tile, mask=live)
