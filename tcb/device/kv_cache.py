"""The keys and values of all layers in one pool of equal blocks, and the views through which each
layer sees its own.

Knows nothing of sequences or of which blocks are in use.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tcb.planning.groups import LayerGroup, block_elements


class KVCache:
    """One tensor `pool [blocks, elements]`, and for every layer views of it.

    key[layer]    [blocks, page_size, kv_heads, dim]          value[layer]  [blocks, page_size,
    kv_heads, value_dim]

    A block holds the pages of one group, layer after layer, each as the page's keys and then its
    values. All groups see all blocks; which group a block belongs to is the planner's to know. The
    memory is not touched before it is written, so it holds anything, NaN included.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        page_size: int,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        elements = block_elements(groups, page_size)
        self.pool = torch.empty((num_blocks, elements), dtype=dtype, device=device)
        self.key: dict[int, Tensor] = {}
        self.value: dict[int, Tensor] = {}
        for group in groups:
            offset = 0
            for layer in group.layers:
                self.key[layer] = self._view(offset, page_size, group.kv_heads, group.dim)
                offset += page_size * group.kv_heads * group.dim
                self.value[layer] = self._view(offset, page_size, group.kv_heads, group.value_dim)
                offset += page_size * group.kv_heads * group.value_dim
            assert offset <= elements, f"group {group} takes {offset} of {elements} elements"

    def _view(self, offset: int, page_size: int, heads: int, dim: int) -> Tensor:
        num_blocks, elements = self.pool.shape
        return self.pool.as_strided(
            (num_blocks, page_size, heads, dim), (elements, heads * dim, dim, 1), offset
        )
