"""Moves blocks of preempted sequences to host memory and back.

Knows nothing of why a block moves; carries out the pairs of a packed batch in their order.
"""

import torch
from torch import Tensor

from tcb.planning.plan import Pairs


class HostBlocks:
    """Room for `num_blocks` blocks in host memory, page-locked where the pool lies on an
    accelerator.

    A block is a row on both sides, so a move is one copy that the host does not wait for: it takes
    its turn among the launches, and the host itself never reads these rows.
    """

    def __init__(self, num_blocks: int, pool: Tensor):
        self._pool = pool
        self._host = torch.empty(
            (num_blocks, pool.shape[1]),
            dtype=pool.dtype,
            pin_memory=pool.device.type != "cpu" and num_blocks > 0,
        )

    def save(self, pairs: Pairs) -> None:
        """Copy blocks of the pool to host slots: (block, host slot) pairs. Writes host memory."""
        for block, slot in pairs:
            self._host[slot].copy_(self._pool[block], non_blocking=True)

    def load(self, pairs: Pairs) -> None:
        """Copy host slots back to blocks of the pool: (host slot, block) pairs. Writes the pool."""
        for slot, block in pairs:
            self._pool[block].copy_(self._host[slot], non_blocking=True)
