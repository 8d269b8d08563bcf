"""The pool of blocks: which are free, idle or held, and which content each can be found by; and the
supply, the blocks that one plan may hand out.

One pool serves all layer groups.
"""

import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from hashlib import blake2b
from itertools import chain

ROOT_HASH = bytes(16)


def hash_page(parent: bytes, tokens: Seq[int]) -> bytes:
    """The 128-bit content hash of one full page, chained to the page before it.

    It is equal in every process.
    """
    ids = array("i", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return blake2b(parent + ids.tobytes(), digest_size=16).digest()


def extend_hashes(block_hashes: list[bytes], tokens: Seq[int], page_size: int) -> None:
    """Append the hash of every full page of `tokens`, which follow the pages hashed so far."""
    for start in range(0, len(tokens) - page_size + 1, page_size):
        parent = block_hashes[-1] if block_hashes else ROOT_HASH
        block_hashes.append(hash_page(parent, tokens[start : start + page_size]))


class BlockPool:
    """Every block is free (no content), idle (no reader, found by its hash) or held (at least one
    reader).

    `free` is a stack: the block given back last is handed out first, so a pool larger than its use
    stays untouched. `idle` is ordered by the time of the last reader: the block that has waited
    longest is handed out first. `block_of[g]` and `hash_of` are the prefix index: the block of a
    hash in group g, and the (group, hash) of a block.
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
        """Take one reader away; the last one leaves the block idle if it is registered, else
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
        """Let a held block be found by its hash; of blocks with equal content the first stays."""
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

    def _leave_free(self, block: int) -> None:
        # blocks are handed out from the end of the stack, so the search is as short as what one
        # plan gives back
        for place in range(len(self.free) - 1, -1, -1):
            if self.free[place] == block:
                del self.free[place]
                return
        raise AssertionError(f"block {block} is not available")


class Supply:
    """The blocks that one plan may hand out, counted without taking any from the pool.

    The order is: given back by this plan, free, idle, given back but registered. `left` is how many
    can still be taken.
    """

    def __init__(self, pool: BlockPool):
        self.left = pool.available
        self._pool = pool
        self._stock = chain(reversed(pool.free), pool.idle)
        self._recycled: list[int] = []
        self._retired: deque[int] = deque()
        self._readers: dict[int, int] = {}
        self._given: set[int] = set()
        self._claimed: set[int] = set()

    def readers(self, block: int) -> int:
        """Readers that the block has left, after what this plan released."""
        return self._readers.get(block, self._pool.readers[block])

    def release(self, block: int) -> None:
        """Count one reader less; without readers the block can be handed out by this plan."""
        self._readers[block] = readers = self.readers(block) - 1
        if readers == 0:
            self.left += 1
            retired = block in self._pool.hash_of
            (self._retired if retired else self._recycled).append(block)

    def take(self, count: int) -> tuple[int, ...]:
        """Name `count` blocks; there must be as many `left`."""
        blocks = (self._next(),) if count == 1 else tuple([self._next() for _ in range(count)])
        self._given.update(blocks)
        self.left -= count
        return blocks

    def find(self, group: int, block_hash: bytes) -> int | None:
        """The block that holds this page, unless this plan promised it to new content."""
        block = self._pool.find(group, block_hash)
        return None if block in self._given else block

    def cost(self, blocks: Iterable[int | None]) -> int:
        """How many blocks sharing these would take out of the supply; None is no block."""
        return sum(
            block is not None and block not in self._claimed and self.readers(block) == 0
            for block in blocks
        )

    def claim(self, blocks: tuple[int, ...]) -> None:
        """Share these blocks: their content stays, so this plan hands none of them out."""
        self.left -= self.cost(blocks)
        self._claimed.update(blocks)

    def _next(self) -> int:
        while True:
            block = self._recycled.pop() if self._recycled else next(self._stock, None)
            if block is None:
                block = self._retired.popleft()
            if block not in self._claimed:
                return block
