"""The tiles of a packed batch in the order they are attended to, listed by the device itself.

A sequence of n new tokens has n * group rows for each key-value head, as the query heads that share
it are packed; a tile is some of them, and an item (sequence, tile of it). Tiles that walk the most
keys come first, so that the last ones to end are short. Lengths stay on the device: the host knows
only what a batch of these shapes has room for, so a captured graph stays right for other lengths.
Knows nothing of keys and values, or of what is done to a tile.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tcb.kernels.contract import Launch

# slots that one program of either kernel fills
_BLOCK = 128
# at four warps either kernel spills registers (255 a thread on sm_80 and sm_90)
_WARPS = 8


class BatchShape(NamedTuple):
    """What a list is made for: all of it the host knows, and none of it a length.

    group       query heads that share a key-value head
    small_rows  sequences of at most so many rows are a list of their own, one tile each; 0: none is
    tile_rows   rows of a tile of the others; 0: there are no others
    """

    tokens: int
    sequences: int
    group: int
    window: int | None
    small_rows: int
    tile_rows: int

    @property
    def small_room(self) -> int:
        """Slots for small sequences, in whole blocks."""
        return _blocks(self.sequences) * _BLOCK if self.small_rows else 0

    @property
    def tile_room(self) -> int:
        """Slots for the tiles of the others, in whole blocks."""
        if not self.tile_rows:
            return 0
        # rows / tile_rows, rounded up for every sequence
        return _blocks(self.tokens * self.group // self.tile_rows + self.sequences) * _BLOCK


@dataclass(frozen=True, slots=True)
class WorkList:
    """The list of small sequences and, behind its room, that of the tiles of the others.

    item   [small_room + tile_room, 2] int32, (sequence, tile); undefined behind a list's count
    count  [2] int32, items of either list
    found  [3, small_room + tile_room] int32, scratch: cost, sequence and tile of every slot
    """

    shape: BatchShape
    item: torch.Tensor
    count: torch.Tensor
    found: torch.Tensor

    def small(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Items and count of the small sequences."""
        return self.item[: self.shape.small_room], self.count[:1]

    def tiles(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Items and count of the tiles of the others."""
        return self.item[self.shape.small_room :], self.count[1:]


def reserve(shape: BatchShape, device: torch.device) -> WorkList:
    """An unfilled list for a batch of this shape."""
    room = shape.small_room + shape.tile_room
    return WorkList(
        shape,
        torch.empty(room, 2, dtype=torch.int32, device=device),
        torch.empty(2, dtype=torch.int32, device=device),
        torch.empty(3, room, dtype=torch.int32, device=device),
    )


def plan_launches(
    work: WorkList, query_start: torch.Tensor, context_len: torch.Tensor
) -> list[Launch]:
    """The two launches that fill a list; all costs are known before a tile is ranked."""
    from tcb.kernels.gpu.work_list_kernel import find_tiles_kernel, rank_tiles_kernel

    shape, room = work.shape, work.item.shape[0]
    small_blocks = shape.small_room // _BLOCK
    lengths = query_start, context_len, shape.sequences, shape.window or 0
    constants = {
        "GROUP": shape.group,
        "SMALL_ROWS": shape.small_rows,
        "TILE_ROWS": max(shape.tile_rows, 1),
        "HAS_WINDOW": shape.window is not None,
        "BLOCK": _BLOCK,
        "num_warps": _WARPS,
    }
    ranked = work.found, work.item, work.count, room, small_blocks
    return [
        Launch(
            find_tiles_kernel,
            room // _BLOCK,
            (work.found, *lengths, room, small_blocks),
            constants,
        ),
        Launch(rank_tiles_kernel, room // _BLOCK, ranked, {"BLOCK": _BLOCK, "num_warps": _WARPS}),
    ]


def _blocks(slots: int) -> int:
    return -(-slots // _BLOCK)
