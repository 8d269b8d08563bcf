"""Moves blocks of preempted sequences to host memory and back, and copies the blocks of forks.

Knows nothing of why a block moves; carries out the pairs of a packed batch in their order.
"""

import torch
from torch import Tensor

from tcb.kernels import copy_blocks, gather_blocks, scatter_blocks
from tcb.planning.plan import Pairs


class HostBlocks:
    """Room for `num_blocks` blocks in host memory, page-locked where the pool lies on an
    accelerator.
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
        if not pairs:
            return
        blocks, slots = _columns(pairs, self._pool.device)
        gathered = self._pool.new_empty((len(pairs), self._pool.shape[1]))
        gather_blocks(self._pool, blocks, gathered)
        self._host[slots.cpu()] = gathered.cpu()

    def load(self, pairs: Pairs) -> None:
        """Copy host slots back to blocks of the pool: (host slot, block) pairs. Writes the pool."""
        if not pairs:
            return
        slots, blocks = _columns(pairs, self._pool.device)
        scatter_blocks(self._host[slots.cpu()].to(self._pool.device), self._pool, blocks)


def fork_blocks(pool: Tensor, pairs: Pairs) -> None:
    """Copy blocks within the pool: (source, target) pairs. Writes the pool."""
    if pairs:
        source, target = _columns(pairs, pool.device)
        copy_blocks(pool, source, target)


def _columns(pairs: Pairs, device: torch.device) -> tuple[Tensor, Tensor]:
    first, second = torch.tensor(pairs, dtype=torch.int64).T.contiguous().to(device)
    return first, second
