"""The limits that `resolve` makes of settings and facts."""

import copy
import logging
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tcb.planning.config import ContinuousBatchingConfig
from tcb.planning.groups import Layer, group_layers
from tcb.planning.limits import (
    BatchSize,
    Facts,
    Limits,
    WorkloadHints,
    batch_bytes,
    block_bytes,
    pool_bytes,
    resolve,
)

MIB = 2**20
FULL = group_layers([Layer(i, None, 2, 8, 8) for i in range(3)])
HYBRID = group_layers([Layer(i, 6 if i % 2 else None, 2, 8, 8) for i in range(4)])
FACTS = Facts(
    device_type="cuda",
    free_memory=100 * MIB,
    host_memory=None,
    element_size=2,
    groups=FULL,
    hidden_size=16,
    vocab_size=100,
    intermediate_size=64,
    max_positions=2048,
)


def limits(facts=None, **settings):
    return resolve(ContinuousBatchingConfig(**settings), replace(FACTS, **(facts or {})))


def test_everything_named_by_the_user():
    assert limits(
        {"groups": HYBRID},
        page_size=4,
        num_blocks=5,
        max_batch_tokens=16,
        max_requests_per_batch=3,
        allow_block_sharing=False,
        use_async_batching=False,
        scheduler_type="prefill_first",
        safety_margin=0.5,
        return_logprobs=True,
        cpu_offload_space=8 * 512 / 2**30,
        deterministic="batch",
    ) == Limits(
        page_size=4,
        # 5 blocks of the whole model, which has two groups
        num_blocks=10,
        max_batch_tokens=16,
        max_requests=3,
        safety_margin=0.5,
        policy="prefill_first",
        share_prefixes=False,
        depth=0,
        # a block has the pages of two layers: 4 tokens, 2 heads, 8 + 8 elements, 2 bytes
        host_blocks=8,
        # the sliding group keeps 3 pages of the 10, so the full one has 7
        max_length=28,
        return_logprobs=True,
        deterministic=True,
        max_positions=2048,
    )


def test_nothing_named_by_the_user():
    found = limits()
    size = BatchSize(max_tokens=8192, max_requests=1024, depth=1, return_logprobs=False)
    assert found == Limits(
        page_size=256,
        num_blocks=found.num_blocks,
        max_batch_tokens=8192,
        max_requests=1024,
        safety_margin=0.15,
        policy="fifo",
        share_prefixes=True,
        depth=1,
        host_blocks=0,
        max_length=2048,
        return_logprobs=False,
        max_positions=2048,
        deterministic=False,
    )
    left = int(0.9 * FACTS.free_memory) - batch_bytes(FACTS, size)
    assert pool_bytes(FACTS, 256, found.num_blocks, size) <= left
    assert pool_bytes(FACTS, 256, found.num_blocks + 1, size) > left


@pytest.mark.parametrize(
    ("device_type", "asked", "needs_history", "depth"),
    [
        ("cuda", None, False, 1),
        ("xpu", None, False, 1),
        ("cpu", None, False, 0),
        ("mps", None, False, 0),
        ("cuda", None, True, 0),
        ("cuda", False, False, 0),
        ("cuda", False, True, 0),
        ("cpu", True, False, 1),
    ],
)
def test_depth(device_type, asked, needs_history, depth):
    facts = {"device_type": device_type, "needs_history": needs_history}
    assert limits(facts, use_async_batching=asked).depth == depth


def test_asynchronous_batches_and_processors_that_need_history_exclude_each_other():
    with pytest.raises(ValueError, match=r"use_async_batching is True.*\(needs_history\)"):
        limits({"needs_history": True}, use_async_batching=True)


@pytest.mark.parametrize(
    ("hinted", "asked", "tokens", "requests"),
    [
        (0, None, None, 1024),
        (7, None, None, 7),
        (5000, None, None, 5000),
        (9000, None, None, 8192),
        (7, 12, None, 12),
        (0, None, 64, 64),
        (0, 100, 64, 64),
        (0, 100, 200, 100),
    ],
)
def test_max_requests(hinted, asked, tokens, requests):
    hints = WorkloadHints(num_requests=hinted)
    found = limits({"hints": hints}, max_requests_per_batch=asked, max_batch_tokens=tokens)
    assert found.max_requests == requests


@pytest.mark.parametrize(
    ("policy", "asked", "margin"),
    [("fifo", None, 0.15), ("prefill_first", None, 0.0), ("fifo", 0, 0.0), ("fifo", 1, 1.0)],
)
def test_safety_margin(policy, asked, margin):
    assert limits(scheduler_type=policy, safety_margin=asked).safety_margin == margin


@pytest.mark.parametrize(
    ("free", "tokens"),
    [(17, 8192), (16, 4096), (9, 4096), (8, 2048), (5, 2048), (4, 1024), (2, 512), (1, 256)],
)
def test_small_memory_makes_small_batches(free, tokens):
    # half of 90 % holds the batch: 848 bytes a token, 600 for each of at most 1,024 rows of logits
    found = limits({"free_memory": free * MIB}, page_size=16)
    assert found.max_batch_tokens == tokens
    assert found.num_blocks >= 1


@pytest.mark.parametrize(("free", "tokens"), [(900, 1024), (4, 1024), (2, 512), (1, 256)])
def test_batches_on_a_cpu_stay_in_its_caches(free, tokens):
    facts = {"free_memory": free * MIB * 3 // 2, "device_type": "cpu"}
    assert limits(facts, page_size=16).max_batch_tokens == tokens


def test_explicit_batch_is_never_made_smaller():
    assert limits({"free_memory": 12 * MIB}, max_batch_tokens=8192).max_batch_tokens == 8192


def test_explicit_pool_takes_its_memory_from_the_batch():
    assert limits(page_size=16, num_blocks=20_000).max_batch_tokens == 8192
    assert limits(page_size=16, num_blocks=28_000).max_batch_tokens == 4096


@pytest.mark.parametrize(
    ("free", "settings", "needed_for"),
    [
        (0, {}, "one page of every layer and batches of 256 tokens"),
        (300_000, {}, "one page of every layer and batches of 256 tokens"),
        (10 * MIB, {"max_batch_tokens": 12_000}, "one page of every layer and batches of 12000"),
        (100 * MIB, {"page_size": 10**6}, "one page of every layer and batches of 256 tokens"),
        (10 * MIB, {"num_blocks": 10_000}, "these 10000 blocks and batches of 256 tokens"),
        (10 * MIB, {"max_memory_percent": 0.01}, "one page of every layer and batches of 256"),
    ],
)
def test_too_little_memory_is_refused_with_figures(free, settings, needed_for):
    with pytest.raises(ValueError, match=r"^max_memory_percent is 0.* and num_blocks is") as raised:
        limits({"free_memory": free}, **settings)
    share = settings.get("max_memory_percent", 0.9)
    assert f"{int(free * share)} bytes of the {free} that are free" in str(raised.value)
    assert needed_for in str(raised.value)
    assert "; accepted: " in str(raised.value)


def test_advice_of_the_refusal_is_good():
    facts = {"free_memory": 10 * MIB}
    with pytest.raises(ValueError, match=r"max_memory_percent in \[0\.") as raised:
        limits(facts, max_memory_percent=0.01)
    enough = float(str(raised.value).split("max_memory_percent in [")[1].split(",")[0])
    assert limits(facts, max_memory_percent=enough + 1e-4).num_blocks >= 1
    with pytest.raises(ValueError, match="max_memory_percent"):
        limits(facts, max_memory_percent=enough - 1e-4)


BLOCK = block_bytes(FACTS, 256)


@pytest.mark.parametrize(
    ("space", "threshold", "host_memory", "blocks"),
    [
        (0.0, 0.8, None, 0),
        (0, 0.8, 100 * BLOCK, 0),
        (10 * BLOCK / 2**30, 0.8, None, 10),
        (10 * BLOCK / 2**30, 0.8, 100 * BLOCK, 10),
        (10 * BLOCK / 2**30, 1.0, 10 * BLOCK, 10),
        (10 * BLOCK / 2**30, 0.5, 10 * BLOCK, 5),
        (10 * BLOCK / 2**30, 0.0, 10 * BLOCK, 0),
        (None, 0.5, 100 * BLOCK, 50),
        (None, 0.0, 100 * BLOCK, 0),
    ],
)
def test_host_blocks(space, threshold, host_memory, blocks):
    found = limits(
        {"host_memory": host_memory},
        cpu_offload_space=space,
        cpu_offload_space_safety_threshold=threshold,
    )
    assert found.host_blocks == blocks


def test_cut_of_host_memory_is_logged(caplog):
    with caplog.at_level(logging.WARNING, logger="ContinuousBatchingLogger"):
        limits({"host_memory": 2**30}, cpu_offload_space=1.5)
    assert caplog.messages == [
        "cpu_offload_space is 1.5 GiB; it is cut to 0.800 GiB, the share of host memory that "
        "cpu_offload_space_safety_threshold = 0.8 allows"
    ]


@pytest.mark.parametrize(
    ("space", "says"),
    [
        (None, "cpu_offload_space is None, but how much memory the host has is not known"),
        (1e-6, "cpu_offload_space is 1e-06, which is 1073 bytes and less than one block of 49152"),
    ],
)
def test_host_memory_that_cannot_be_had_is_refused(space, says):
    with pytest.raises(ValueError, match=says):
        limits(cpu_offload_space=space)


def test_resolve_checks_first():
    with pytest.raises(ValueError, match="page_size is 3"):
        limits(page_size=3)


SETTINGS = st.fixed_dictionaries(
    {"page_size": st.integers(4, 300)},
    optional={
        "num_blocks": st.integers(1, 50),
        "max_batch_tokens": st.integers(1, 10_000),
        "max_requests_per_batch": st.integers(1, 2000),
        "max_memory_percent": st.floats(0.01, 1),
        "use_async_batching": st.booleans(),
    },
)


@given(SETTINGS, st.sampled_from([FULL, HYBRID]), st.integers(2**16, 2**28), st.booleans())
def test_limits_keep_within_memory_or_there_are_none(settings, groups, free_memory, keeps_logits):
    facts = replace(FACTS, groups=groups, free_memory=free_memory, keeps_logits=keeps_logits)
    config = ContinuousBatchingConfig(**settings)
    before = copy.deepcopy(config)
    try:
        found = resolve(config, facts)
    except ValueError as error:
        assert str(error).startswith("max_memory_percent is ")
        return
    finally:
        assert config == before
    size = BatchSize(found.max_batch_tokens, found.max_requests, found.depth, False)
    used = batch_bytes(facts, size) + pool_bytes(facts, found.page_size, found.num_blocks, size)
    assert used <= free_memory * settings.get("max_memory_percent", 0.9)
    assert found.num_blocks >= len(groups)
    assert found.max_length >= min(found.page_size, FACTS.max_positions)
    assert 1 <= found.max_requests <= found.max_batch_tokens
    assert resolve(config, facts) == found
    if "num_blocks" in settings:
        assert found.num_blocks == settings["num_blocks"] * len(groups)
