"""The tiles of a packed batch in the order they are attended to, listed by the device itself.

A sequence of n new tokens has n * q_per_kv rows for each key-value head, as the query heads that
share it are packed; a tile is some of them, and an item (sequence, tile of it). Tiles that walk the
most keys come first, so that the last ones to end are short. Lengths stay on the device: the host
knows only what a batch of these shapes has room for, so a captured graph stays right for other
lengths. Knows nothing of keys and values, or of what is done to a tile.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from tcb.kernels.contract import BatchShape, WorkList
from tcb.kernels.gpu.launch import Launch, ceil_div

# slots that one program of either kernel fills
_BLOCK = 128
# at four warps either kernel spills registers (255 a thread on sm_80 and sm_90)
_OPTIONS = {"BLOCK": _BLOCK, "num_warps": 8}


def rooms(shape: BatchShape) -> tuple[int, int]:
    """Slots for small sequences and slots for the tiles of the others, in whole blocks."""
    small = _in_blocks(shape.sequences) if shape.small_rows else 0
    if not shape.tile_rows:
        return small, 0
    # rows / tile_rows, rounded up for every sequence
    tiles = shape.tokens * shape.q_per_kv // shape.tile_rows + shape.sequences
    return small, _in_blocks(tiles)


def reserve(shape: BatchShape, device: torch.device) -> WorkList:
    """An unfilled list for a batch of this shape."""
    small, tiles = rooms(shape)
    item, count, found = (
        torch.empty(extent, dtype=torch.int32, device=device)
        for extent in ((small + tiles, 2), (2,), (3, small + tiles))
    )
    return WorkList(shape, small, item, count, found)


def fit(work: WorkList, shape: BatchShape) -> WorkList:
    """A given list, once it is known to be for this shape; raises ValueError if it is not."""
    if not isinstance(work, WorkList):
        raise ValueError(f"work_list: expected None or a WorkList, got {type(work).__name__}")
    small, tiles = rooms(shape)
    if work.shape is None and work.item.shape[0] == small + tiles:
        return replace(work, shape=shape, small_room=small)
    if work.shape != shape:
        made_for = work.shape or f"{work.item.shape[0]} slots"
        raise ValueError(f"work_list: expected one for {shape}, got one for {made_for}")
    return work


def plan_launches(work: WorkList, query_start: Tensor, context_len: Tensor) -> list[Launch]:
    """The two launches that fill a list; all costs are known before a tile is ranked."""
    shape, room = work.shape, work.item.shape[0]
    assert shape is not None, "a list to fill has a shape"
    blocks = room, work.small_room // _BLOCK
    lengths = query_start, context_len, shape.sequences, shape.window or 0
    constants = {
        "Q_PER_KV": shape.q_per_kv,
        "SMALL_ROWS": shape.small_rows,
        "TILE_ROWS": max(shape.tile_rows, 1),
        "HAS_WINDOW": shape.window is not None,
        **_OPTIONS,
    }
    ranked, programs = (work.found, work.item, work.count, *blocks), room // _BLOCK
    return [
        Launch(find_tiles_kernel, programs, (work.found, *lengths, *blocks), constants),
        Launch(rank_tiles_kernel, programs, ranked, _OPTIONS),
    ]


def _in_blocks(slots: int) -> int:
    return ceil_div(slots, _BLOCK) * _BLOCK


@triton.jit
def find_slots(slot, query_start_ptr, num_sequences, Q_PER_KV: tl.constexpr, ROWS: tl.constexpr):
    """Return (sequence, tile of it) of slots among the tiles; many name a tile that is not there.

    Sequence i owns the slots from start(i) = rows before it // ROWS + i on. That is never fewer
    than it needs, as floor((a + b) / M) + 1 - floor(a / M) >= ceil(b / M), grows strictly, and
    needs no prefix sum. So the sequence of a slot is the number of starts up to it, less one; a
    slot before all of them gets a negative tile.
    """
    LANES: tl.constexpr = 64
    found = tl.zeros_like(slot)
    for first in range(0, num_sequences, LANES):
        index = first + tl.arange(0, LANES)
        inside = index < num_sequences
        before = tl.load(query_start_ptr + index, mask=inside, other=0)
        start = before * Q_PER_KV // ROWS + index
        found += tl.sum((inside[None, :] & (start[None, :] <= slot[:, None])).to(tl.int32), 1)
    sequence = tl.maximum(found - 1, 0)
    before = tl.load(query_start_ptr + sequence)
    return sequence, slot - (before * Q_PER_KV // ROWS + sequence)


# the lengths are parts of larger tensors, so their alignment is that of chance
@triton.jit(
    do_not_specialize=["num_sequences", "window", "room", "small_blocks"],
    do_not_specialize_on_alignment=["query_start_ptr", "context_len_ptr"],
)
def find_tiles_kernel(
    found_ptr,
    query_start_ptr,
    context_len_ptr,
    num_sequences,
    window,
    room,
    small_blocks,
    Q_PER_KV: tl.constexpr,
    SMALL_ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write cost, sequence and tile of the slots of one block; the cost of no tile is 0.

    The cost of a tile is the number of keys that some row of it sees. The first small_blocks blocks
    have a slot a sequence, the others slots for tiles.
    """
    program = tl.program_id(0)
    slot = program * BLOCK + tl.arange(0, BLOCK)
    is_small = program < small_blocks
    if is_small:
        tile_rows = tl.full([], SMALL_ROWS, tl.int32)
        sequence = tl.minimum(slot, num_sequences - 1)
        tile = slot - sequence
    else:
        tile_rows = tl.full([], TILE_ROWS, tl.int32)
        sequence, tile = find_slots(
            slot - small_blocks * BLOCK, query_start_ptr, num_sequences, Q_PER_KV, TILE_ROWS
        )
    query_start = tl.load(query_start_ptr + sequence)
    rows = (tl.load(query_start_ptr + sequence + 1) - query_start) * Q_PER_KV
    context_len = tl.load(context_len_ptr + sequence)
    first_row = tile * tile_rows
    last_row = tl.minimum(first_row + tile_rows, rows) - 1
    cost = context_len + last_row // Q_PER_KV + 1
    if HAS_WINDOW:
        cost -= tl.maximum(context_len + first_row // Q_PER_KV - window + 1, 0)
    live = (first_row >= 0) & (first_row < rows) & ((rows <= SMALL_ROWS) == is_small)
    tl.store(found_ptr + slot, tl.where(live, cost, 0))
    tl.store(found_ptr + room + slot, sequence)
    tl.store(found_ptr + 2 * room + slot, tile)


@triton.jit(do_not_specialize=["room", "small_blocks"])
def rank_tiles_kernel(found_ptr, item_ptr, count_ptr, room, small_blocks, BLOCK: tl.constexpr):
    """Put the tiles of one block in their places: behind all of a greater cost, and behind those of
    the same cost in earlier slots. The first block of a list writes its count.
    """
    LANES: tl.constexpr = 64
    program = tl.program_id(0)
    slot = program * BLOCK + tl.arange(0, BLOCK)
    is_small = program < small_blocks
    first = tl.where(is_small, 0, small_blocks * BLOCK)
    end = tl.where(is_small, small_blocks * BLOCK, room)
    cost = tl.load(found_ptr + slot)
    place = tl.zeros_like(slot)
    count = tl.zeros([LANES], tl.int32)
    for start in range(first, end, LANES):
        other = start + tl.arange(0, LANES)
        other_cost = tl.load(found_ptr + other)
        ahead = other_cost[None, :] > cost[:, None]
        ahead |= (other_cost[None, :] == cost[:, None]) & (other[None, :] < slot[:, None])
        place += tl.sum(ahead.to(tl.int32), 1)
        count += (other_cost > 0).to(tl.int32)
    item_ptr += 2 * (first + place)
    tl.store(item_ptr, tl.load(found_ptr + room + slot), mask=cost > 0)
    tl.store(item_ptr + 1, tl.load(found_ptr + 2 * room + slot), mask=cost > 0)
    if program * BLOCK == first:
        tl.store(count_ptr + tl.where(is_small, 0, 1), tl.sum(count, 0))
