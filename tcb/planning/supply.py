"""The blocks that one plan may hand out, counted without taking any of them.

Reads a `BlockPool`, never writes it: what this plan gives away, shares or gets back is kept in
local counters.
"""

from collections import deque
from collections.abc import Iterable
from itertools import chain

from tcb.planning.blocks import BlockPool


class Supply:
    """Blocks in the order in which they are handed out: given back by this plan, free, idle, given
    back but registered.

    `left` is how many can still be taken.
    """

    __slots__ = (
        "_claimed",
        "_given",
        "_pool",
        "_readers",
        "_recycled",
        "_retired",
        "_stock",
        "left",
    )

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
        pool = self._pool
        readers = self._readers.get(block, pool.readers[block]) - 1
        self._readers[block] = readers
        if readers == 0:
            self.left += 1
            if block in pool.hash_of:
                self._retired.append(block)
            else:
                self._recycled.append(block)

    def take(self, count: int) -> tuple[int, ...]:
        """Name `count` blocks; there must be as many `left`."""
        blocks = (self._next(),) if count == 1 else tuple([self._next() for _ in range(count)])
        self._given.update(blocks)
        self.left -= count
        return blocks

    def find(self, group: int, block_hash: bytes) -> int | None:
        """The block that holds this page, unless this plan has promised it to somebody else's new
        content.
        """
        block = self._pool.find(group, block_hash)
        return None if block in self._given else block

    def cost(self, blocks: Iterable[int]) -> int:
        """How many of these blocks sharing would take out of the supply."""
        return sum(self.readers(block) == 0 and block not in self._claimed for block in blocks)

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
