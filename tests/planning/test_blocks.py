"""Who holds a block, and what it can be found by, one small case each."""

import subprocess
import sys

import pytest

from tcb.planning.blocks import ROOT_HASH, BlockPool, hash_page
from tests.planning.pool_check import check_pool

HASH = hash_page(ROOT_HASH, [1, 2, 3, 4])
OTHER = hash_page(ROOT_HASH, [1, 2, 3, 5])


@pytest.fixture
def pool():
    return BlockPool(num_blocks=4, num_groups=2)


def hold_hashed(pool, block=0, group=0, block_hash=HASH):
    pool.take(block)
    pool.register(block, group, block_hash)


def test_a_digest_depends_on_every_token_and_on_the_pages_before():
    block_hashes = {
        hash_page(ROOT_HASH, [1, 2]),
        hash_page(ROOT_HASH, [2, 1]),
        hash_page(ROOT_HASH, [1, 2, 0]),
        hash_page(HASH, [1, 2]),
    }
    assert len(block_hashes) == 4 and {len(block_hash) for block_hash in block_hashes} == {16}


def test_a_digest_is_the_same_in_every_process():
    code = "from tcb.planning.blocks import *; print(hash_page(ROOT_HASH, [1, 2, 3, 4]).hex())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == HASH.hex()


def test_a_new_pool_is_free(pool):
    check_pool(pool)
    assert pool.available == 4 and pool.free[-1] == 0


def test_a_block_without_content_is_free_again_when_its_reader_leaves(pool):
    pool.take(2)
    assert pool.available == 3 and pool.readers[2] == 1
    pool.drop(2)
    check_pool(pool)
    assert pool.available == 4 and pool.free[-1] == 2 and not pool.idle


def test_an_indexed_block_is_idle_and_found_when_its_reader_leaves(pool):
    hold_hashed(pool)
    pool.drop(0)
    check_pool(pool)
    assert pool.available == 4 and list(pool.idle) == [0]
    assert pool.find(0, HASH) == 0


def test_content_is_found_in_its_own_group_only(pool):
    hold_hashed(pool, group=1)
    assert pool.find(0, HASH) is None and pool.find(1, HASH) == 0


def test_an_idle_block_is_shared_with_its_content(pool):
    hold_hashed(pool)
    pool.drop(0)
    pool.share(0)
    check_pool(pool)
    assert pool.readers[0] == 1 and not pool.idle and pool.find(0, HASH) == 0


def test_a_taken_idle_block_forgets_its_content(pool):
    hold_hashed(pool)
    pool.drop(0)
    pool.take(0)
    check_pool(pool)
    assert pool.find(0, HASH) is None and pool.readers[0] == 1


def test_every_reader_has_to_leave(pool):
    pool.take(0)
    pool.share(0)
    pool.drop(0)
    assert pool.readers[0] == 1 and pool.available == 3
    pool.drop(0)
    assert pool.available == 4


def test_idle_blocks_wait_in_the_order_in_which_their_last_reader_left(pool):
    hold_hashed(pool, 0, 0, HASH)
    hold_hashed(pool, 1, 0, OTHER)
    pool.drop(0)
    pool.drop(1)
    assert list(pool.idle) == [0, 1]
    pool.share(0)
    pool.drop(0)
    assert list(pool.idle) == [1, 0]


def test_the_first_block_of_equal_content_stays_the_one_that_is_found(pool):
    hold_hashed(pool, 0)
    hold_hashed(pool, 1)
    check_pool(pool)
    assert pool.find(0, HASH) == 0
    pool.drop(1)
    assert 1 in pool.free


def test_a_block_has_one_content(pool):
    hold_hashed(pool, 0, 0, HASH)
    pool.register(0, 0, OTHER)
    check_pool(pool)
    assert pool.find(0, OTHER) is None


def test_forget_all_leaves_held_blocks_held_and_frees_the_idle(pool):
    hold_hashed(pool, 0, 0, HASH)
    hold_hashed(pool, 1, 1, OTHER)
    pool.drop(0)
    pool.forget_all()
    check_pool(pool)
    assert pool.find(0, HASH) is None and pool.find(1, OTHER) is None
    assert pool.readers[1] == 1 and pool.available == 3 and not pool.idle


@pytest.mark.parametrize("misuse", ["take", "drop", "share"])
def test_misuse_is_an_error(pool, misuse):
    if misuse == "take":
        pool.take(0)
    with pytest.raises(AssertionError, match="block 0"):
        getattr(pool, misuse)(0)


@pytest.mark.parametrize("field", ["free", "idle", "readers", "index"])
def test_check_finds_what_is_broken(pool, field):
    hold_hashed(pool)
    check_pool(pool)
    if field == "free":
        pool.free.append(0)
    elif field == "idle":
        pool.idle[3] = None
    elif field == "readers":
        pool.readers[0] = 0
    else:
        del pool.hash_of[0]
    with pytest.raises(AssertionError):
        check_pool(pool)
