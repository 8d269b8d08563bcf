"""Sizes worked out by hand for a small model, and what must hold for every model."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tcb.planning.groups import Layer, group_layers
from tcb.planning.limits import (
    MAX_INT32,
    MOST_BLOCKS,
    BatchSize,
    Facts,
    batch_bytes,
    block_bytes,
    blocks_needed,
    fitting_blocks,
    longest_sequence,
    memory_share,
    pool_bytes,
)

FULL = group_layers([Layer(i, None, 2, 8, 8) for i in range(3)])
HYBRID = group_layers([Layer(i, 6 if i % 2 else None, 2, 8, 8) for i in range(4)])
SLIDING = group_layers([Layer(i, 6, 2, 8, 8) for i in range(3)])
FACTS = Facts(
    device_type="cuda",
    free_memory=2**30,
    host_memory=None,
    element_size=2,
    groups=FULL,
    hidden_size=16,
    vocab_size=100,
    intermediate_size=64,
)
SIZE = BatchSize(max_tokens=10, max_requests=4, depth=0, return_logprobs=False)


@pytest.mark.parametrize(
    ("device_type", "samples", "share"),
    [
        ("cuda", False, 0.9),
        ("xpu", False, 0.9),
        ("cuda", True, 0.8),
        ("cpu", False, 0.6),
        ("cpu", True, 0.6),
        ("mps", False, 0.6),
    ],
)
def test_memory_share(device_type, samples, share):
    assert memory_share(replace(FACTS, device_type=device_type, samples=samples)) == share


@pytest.mark.parametrize(("groups", "layers_in_block"), [(FULL, 3), (HYBRID, 2), (SLIDING, 3)])
def test_block_bytes(groups, layers_in_block):
    # a layer's page of 4 tokens: 2 heads of 8 + 8 elements of 2 bytes
    one_page = 4 * 2 * (8 + 8) * 2
    assert block_bytes(replace(FACTS, groups=groups), 4) == layers_in_block * one_page


ACTIVATION = (4 * 16 + 3 * 64 + 2 * 32) * 2 + 8 * 16


@pytest.mark.parametrize(
    ("facts", "size", "expected"),
    [
        ({}, {}, 10 * (ACTIVATION + 40) + 4 * 100 * (2 + 4)),
        ({"groups": HYBRID}, {}, 10 * (ACTIVATION + 48) + 4 * 100 * (2 + 4)),
        ({}, {"depth": 1}, 10 * (ACTIVATION + 2 * 40) + 4 * 100 * (2 + 4)),
        ({"keeps_logits": False}, {}, 10 * (ACTIVATION + 40) + 10 * 100 * (2 + 4)),
        ({"samples": True}, {}, 10 * (ACTIVATION + 40) + 4 * 100 * (2 + 8)),
        (
            {"samples": True},
            {"return_logprobs": True},
            10 * (ACTIVATION + 40) + 4 * 100 * (2 + 12),
        ),
    ],
    ids=["plain", "two groups", "depth 1", "all logits", "sampling", "sampling, logprobs"],
)
def test_batch_bytes(facts, size, expected):
    assert batch_bytes(replace(FACTS, **facts), replace(SIZE, **size)) == expected


@pytest.mark.parametrize(
    ("groups", "size", "columns", "copies"),
    [
        # 7 blocks: as many columns for the one group
        (FULL, {}, 7, 2),
        (FULL, {"depth": 1}, 7, 3),
        # 7 blocks: 3 for the sliding group's window of 6, so 4 for the full one; a chunk of 10
        # reads and writes 15 positions, which touch at most 5 pages, but no sequence has so many
        (HYBRID, {}, 4 + 4, 2),
        # a sliding group never needs more columns than window and chunk touch
        (SLIDING, {}, 5, 2),
    ],
    ids=["full", "depth 1", "hybrid", "sliding"],
)
def test_pool_bytes(groups, size, columns, copies):
    facts, size = replace(FACTS, groups=groups), replace(SIZE, **size)
    tables = columns * 4 * size.max_requests * copies
    assert pool_bytes(facts, 4, 7, size) == 7 * block_bytes(facts, 4) + tables


@pytest.mark.parametrize(
    ("groups", "max_positions", "num_blocks", "longest"),
    [
        (FULL, None, 0, 0),
        (FULL, None, 1, 4),
        (FULL, None, 7, 28),
        (FULL, 10, 7, 10),
        (FULL, None, 2**40, MAX_INT32),
        # a full and a sliding group of window 6, page 4: the sliding one stops at 3 pages
        (HYBRID, None, 1, 0),
        (HYBRID, None, 2, 4),
        (HYBRID, None, 5, 8),
        (HYBRID, None, 6, 12),
        (HYBRID, None, 7, 16),
        (SLIDING, None, 2, 8),
        (SLIDING, None, 3, MAX_INT32),
        (SLIDING, 50, 3, 50),
    ],
)
def test_longest_sequence(groups, max_positions, num_blocks, longest):
    facts = replace(FACTS, groups=groups, max_positions=max_positions)
    assert longest_sequence(facts, 4, num_blocks) == longest


@given(
    st.lists(st.sampled_from([None, 1, 3, 6, 40]), min_size=1, max_size=4),
    st.integers(0, 60),
    st.integers(4, 9),
)
def test_longest_sequence_fits_and_one_more_does_not(windows, num_blocks, page_size):
    groups = group_layers([Layer(i, window, 1, 8, 8) for i, window in enumerate(windows)])
    longest = longest_sequence(replace(FACTS, groups=groups), page_size, num_blocks)
    assert blocks_needed(groups, page_size, longest) <= num_blocks
    if longest < MAX_INT32:
        assert blocks_needed(groups, page_size, longest + 1) > num_blocks


@given(
    st.sampled_from([FULL, HYBRID, SLIDING]),
    st.integers(0, 10**6),
    st.integers(4, 64),
    st.sampled_from([None, 100]),
)
def test_fitting_blocks_fit_and_one_more_does_not(groups, budget, page_size, max_positions):
    facts = replace(FACTS, groups=groups, max_positions=max_positions)
    num_blocks = fitting_blocks(facts, page_size, SIZE, budget)
    batch = batch_bytes(facts, SIZE)
    if num_blocks:
        assert batch + pool_bytes(facts, page_size, num_blocks, SIZE) <= budget
    assert batch + pool_bytes(facts, page_size, num_blocks + 1, SIZE) > budget


def test_a_pool_of_tiny_blocks_ends_where_the_host_would_have_too_many():
    facts = replace(FACTS, free_memory=2**50)
    assert fitting_blocks(facts, 4, SIZE, 2**50) == MOST_BLOCKS
