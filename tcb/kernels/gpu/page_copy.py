"""Copy whole blocks of the pool: within it for forks, out of it and back for offload.

    target[target_block[i]] = source[source_block[i]]

A missing list of blocks stands for 0, 1, 2, ..., so one kernel copies, gathers and scatters. A
block is a row of elements; it knows neither pages nor layers.
"""

import triton
import triton.language as tl
from torch import Tensor

from tcb.kernels.gpu.launch import Launch, ceil_div, start

# bytes that one program of 4 warps copies: four times 16 bytes a thread, so that loads overlap
_TILE_BYTES = 8192


def move(
    source: Tensor, source_block: Tensor | None, target: Tensor, target_block: Tensor | None
) -> None:
    """Copy blocks between tensors that were checked; at least one of the lists is given."""
    blocks = target_block if source_block is None else source_block
    assert blocks is not None, "neither source_block nor target_block"
    elements, block_elements = source.shape[1], _TILE_BYTES // source.element_size()
    tiles = ceil_div(elements, block_elements)
    strides = source.stride(0), target.stride(0)
    arguments = source, source_block, target, target_block, elements, tiles, *strides
    programs, constants = blocks.shape[0] * tiles, {"BLOCK_ELEMENTS": block_elements}
    if programs:
        start([Launch(move_blocks_kernel, programs, arguments, constants)], source)


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
