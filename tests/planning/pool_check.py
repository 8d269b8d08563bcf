"""What must hold of a pool of blocks at any time."""

from tcb.planning.blocks import BlockPool


def check_pool(pool: BlockPool) -> None:
    """Assert that every block is in one of free, idle and held, and that the index is a
    bijection.
    """
    held = {block for block, readers in enumerate(pool.readers) if readers}
    assert len(pool.free) + len(pool.idle) + len(held) == pool.num_blocks, (
        "a block is lost or twice"
    )
    assert len({*pool.free, *pool.idle, *held}) == pool.num_blocks, "a block is in two places"
    assert all(block in pool.hash_of for block in pool.idle), "an idle block has no content"
    assert not any(block in pool.hash_of for block in pool.free), "a free block is registered"
    assert all(pool.block_of[g][h] == b for b, (g, h) in pool.hash_of.items()), "index is broken"
    assert sum(map(len, pool.block_of)) == len(pool.hash_of), "index holds a forgotten block"
