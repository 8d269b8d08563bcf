"""The pool of blocks: which are free, idle or held, and which content each one can be found by.

Knows nothing of sequences, of what a block's bytes mean, or of which layer group asks: one pool
serves all groups.
"""

import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence as Seq
from hashlib import blake2b

ROOT_HASH = bytes(16)


def hash_page(parent: bytes, tokens: Seq[int]) -> bytes:
    """The 128-bit content hash of one full page, chained to the page before it; equal in every
    process.
    """
    ids = array("i", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return blake2b(parent + ids.tobytes(), digest_size=16).digest()


class BlockPool:
    """Every block is free (no content), idle (no reader, found by its hash) or held (at least one
    reader).

    `free` is a stack: the block given back last is handed out first, so a pool larger than its use
    stays untouched. `idle` is ordered by the time of the last reader: the block that has waited
    longest is handed out first.
    """

    __slots__ = ("block_of", "free", "hash_of", "idle", "num_blocks", "readers")

    def __init__(self, num_blocks: int, num_groups: int):
        self.num_blocks = num_blocks
        self.free: list[int] = list(range(num_blocks - 1, -1, -1))
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.readers: list[int] = [0] * num_blocks
        self.block_of: tuple[dict[bytes, int], ...] = tuple({} for _ in range(num_groups))
        self.hash_of: dict[int, tuple[int, bytes]] = {}

    @property
    def available(self) -> int:
        """How many blocks can be handed out now."""
        return len(self.free) + len(self.idle)

    def find(self, group: int, block_hash: bytes) -> int | None:
        """The block that holds this page of this group, if there is one."""
        return self.block_of[group].get(block_hash)

    def take(self, block: int) -> None:
        """Hand a free or idle block to its first reader; what it held is forgotten."""
        if block in self.idle:
            del self.idle[block]
            self.forget(block)
        else:
            self._leave_free(block)
        self.readers[block] = 1

    def share(self, block: int) -> None:
        """Add a reader to a block that is held or registered."""
        assert self.readers[block] or block in self.hash_of, f"block {block} has nothing to share"
        self.idle.pop(block, None)
        self.readers[block] += 1

    def drop(self, block: int) -> None:
        """Take one reader away; without readers the block becomes idle if it is registered, else
        free.
        """
        assert self.readers[block] > 0, f"block {block} has no reader to drop"
        self.readers[block] -= 1
        if self.readers[block] == 0:
            if block in self.hash_of:
                self.idle[block] = None
            else:
                self.free.append(block)

    def register(self, block: int, group: int, block_hash: bytes) -> None:
        """Let a held block be found by its content; the first block of equal content stays the one
        that is found.
        """
        if block_hash not in self.block_of[group] and block not in self.hash_of:
            self.block_of[group][block_hash] = block
            self.hash_of[block] = (group, block_hash)

    def forget(self, block: int) -> None:
        """Drop a block's content from the index."""
        group, block_hash = self.hash_of.pop(block)
        del self.block_of[group][block_hash]

    def forget_all(self) -> None:
        """Empty the index; idle blocks become free."""
        for found in self.block_of:
            found.clear()
        self.hash_of.clear()
        self.free.extend(self.idle)
        self.idle.clear()

    def check(self) -> None:
        """Assert that every block is in exactly one of free, idle and held, and that the index is a
        bijection.
        """
        held = {block for block, readers in enumerate(self.readers) if readers}
        assert len(self.free) + len(self.idle) + len(held) == self.num_blocks, (
            "a block is lost or twice"
        )
        assert len({*self.free, *self.idle, *held}) == self.num_blocks, "a block is in two places"
        assert all(block in self.hash_of for block in self.idle), "an idle block has no content"
        assert not any(block in self.hash_of for block in self.free), (
            "a free block is still registered"
        )
        assert all(self.block_of[g][d] == b for b, (g, d) in self.hash_of.items()), (
            "index is broken"
        )
        assert sum(map(len, self.block_of)) == len(self.hash_of), "index holds a forgotten block"

    def _leave_free(self, block: int) -> None:
        # blocks are handed out from the end of the stack, so the search is as short as what one
        # plan gives back
        for place in range(len(self.free) - 1, -1, -1):
            if self.free[place] == block:
                del self.free[place]
                return
        raise AssertionError(f"block {block} is not available")
