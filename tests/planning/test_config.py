"""The config as a drop-in for transformers', and how it is read from configs of others."""

import copy
import dataclasses
import inspect
import os
import pickle
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from tcb.planning.config import ContinuousBatchingConfig, check


def test_fields_and_defaults():
    expected = {
        "page_size": 256,
        "num_blocks": None,
        "max_batch_tokens": None,
        "max_memory_percent": None,
        "max_requests_per_batch": None,
        "max_blocks_per_request": None,
        "allow_block_sharing": True,
        "use_async_batching": None,
        "use_cuda_graph": None,
        "q_padding_interval_size": 0,
        "kv_padding_interval_size": 0,
        "varlen_compile_config": None,
        "decode_compile_config": None,
        "default_compile_level": 0,
        "scheduler_type": "fifo",
        "safety_margin": None,
        "return_logprobs": False,
        "seed": None,
        "auto_switch_to_flash": True,
        "cpu_offload_space": 0.0,
        "cpu_offload_space_safety_threshold": 0.8,
        "max_queue_size": 0,
        "per_request_processors": False,
        "drop_unsupported_processors": True,
        "disable_nccl_graph_mixing": True,
        "cpu_group_timeout": 300.0,
        "use_default_compile_configs": None,
        "max_cached_graphs": None,
        "block_size": None,
        "deterministic": "off",
    }
    parameters = inspect.signature(ContinuousBatchingConfig).parameters
    assert [(p.name, p.default) for p in parameters.values()] == list(expected.items())
    assert dataclasses.asdict(ContinuousBatchingConfig()) == expected


def test_fields_are_those_of_the_installed_transformers():
    theirs = {f.name: f.default for f in dataclasses.fields(transformers.ContinuousBatchingConfig)}
    ours = {f.name: f.default for f in dataclasses.fields(ContinuousBatchingConfig)}
    del ours["deterministic"]
    if "page_size" not in theirs:
        # 5.17: `block_size` is the page size, `auto_switch_to_flash` is still to come
        for name in ("block_size", "auto_switch_to_flash"):
            del ours[name]
        ours = {"block_size" if n == "page_size" else n: value for n, value in ours.items()}
    assert list(ours.items()) == list(theirs.items())


def test_positional_use_and_both_names_of_the_page_size():
    assert ContinuousBatchingConfig(16, 3).num_blocks == 3
    assert ContinuousBatchingConfig(block_size=16).page_size == 16
    assert ContinuousBatchingConfig(page_size=16, block_size=16).page_size == 16
    with pytest.raises(ValueError, match="block_size is 32 and page_size is 16; accepted"):
        ContinuousBatchingConfig(page_size=16, block_size=32)


def test_unknown_keyword_is_a_type_error():
    with pytest.raises(TypeError, match="max_batch_token"):
        ContinuousBatchingConfig(max_batch_token=64)
    with pytest.raises(TypeError, match="max_batch_token"):
        ContinuousBatchingConfig.read({"max_batch_token": 64})


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, (False, False)),
        (True, (True, True)),
        (False, (False, False)),
        ((True, False), (True, False)),
        ([False, True], (False, True)),
    ],
)
def test_cuda_graph_booleans(asked, expected):
    assert ContinuousBatchingConfig(use_cuda_graph=asked).cuda_graph_booleans == expected


def test_fallback_max_blocks_per_request():
    assert ContinuousBatchingConfig().fallback_max_blocks_per_request == 32


def test_config_can_be_copied_and_pickled():
    config = ContinuousBatchingConfig(page_size=16, varlen_compile_config={"mode": "default"})
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config


@dataclass
class CompileConfig:
    options: dict = field(default_factory=dict)


@dataclass
class Old:
    """As in transformers 5.17: the page size is called `block_size`."""

    block_size: int = 256
    num_blocks: int | None = None
    varlen_compile_config: Any = None


@dataclass
class New:
    """As in transformers 5.24, which fills `page_size` from a deprecated `block_size`."""

    page_size: int = 256
    num_blocks: int | None = None
    block_size: int | None = None


@dataclass
class Newer:
    """As a later version may be: with fields that are not known here."""

    page_size: int = 256
    turbo: bool = False
    lanes: list = field(default_factory=list)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (None, {}),
        ({}, {}),
        ({"page_size": 16, "num_blocks": 3}, {"page_size": 16, "num_blocks": 3}),
        ({"block_size": 16}, {"page_size": 16, "block_size": 16}),
        (ContinuousBatchingConfig(page_size=16), {"page_size": 16}),
        (Old(), {}),
        (Old(block_size=16, num_blocks=3), {"page_size": 16, "num_blocks": 3}),
        (New(), {}),
        (New(page_size=16), {"page_size": 16}),
        (New(page_size=16, block_size=16), {"page_size": 16, "block_size": 16}),
        (Newer(page_size=16), {"page_size": 16}),
        (SimpleNamespace(page_size=16, seed=1), {"page_size": 16, "seed": 1}),
    ],
    ids=repr,
)
def test_read(other, expected):
    config = ContinuousBatchingConfig.read(other)
    assert type(config) is ContinuousBatchingConfig
    assert config == ContinuousBatchingConfig(**expected)
    assert config is not other


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (5, "continuous_batching_config is 5; accepted: None, mappings, and"),
        ("fifo", "continuous_batching_config is 'fifo'"),
        (ContinuousBatchingConfig, "continuous_batching_config is <class"),
        (SimpleNamespace(max_new_tokens=5), "continuous_batching_config is namespace"),
        (Newer(turbo=True), "turbo is True, which is unknown; accepted: .*page_size"),
        (Newer(lanes=[1]), r"lanes is \[1\], which is unknown"),
        (SimpleNamespace(page_size=16, pages=5), "pages is 5, which is unknown"),
    ],
    ids=repr,
)
def test_read_refuses_what_it_does_not_know(other, says):
    with pytest.raises(TypeError, match=says):
        ContinuousBatchingConfig.read(other)


def test_attribute_set_on_a_config_by_mistake_is_not_lost():
    other = New()
    other.max_batch_token = 64
    with pytest.raises(TypeError, match="max_batch_token is 64, which is unknown"):
        ContinuousBatchingConfig.read(other)


def test_page_size_changed_after_block_size_was_given_is_found_by_check():
    config = ContinuousBatchingConfig.read(New(page_size=256, block_size=32))
    with pytest.raises(ValueError, match="block_size is 32 and page_size is 256"):
        check(config)


@pytest.mark.parametrize("make", [dict, lambda **kw: Old(**kw)], ids=["mapping", "object"])
def test_read_copies_deeply(make):
    other = make(varlen_compile_config=CompileConfig({"a": [1]}))
    before = copy.deepcopy(other)
    config = ContinuousBatchingConfig.read(other)
    config.varlen_compile_config.options["a"].append(2)
    config.page_size = 4
    assert other == before


def test_read_takes_the_config_of_the_installed_transformers():
    theirs = transformers.ContinuousBatchingConfig
    assert ContinuousBatchingConfig.read(theirs()) == ContinuousBatchingConfig()
    page_size = next(name for name in ("page_size", "block_size") if hasattr(theirs(), name))
    other = theirs(**{page_size: 16}, num_blocks=3, decode_compile_config={"mode": "default"})
    config = ContinuousBatchingConfig.read(other)
    assert (config.page_size, config.num_blocks) == (16, 3)
    assert isinstance(config.decode_compile_config, transformers.CompileConfig)
    assert config.decode_compile_config is not other.decode_compile_config
    check(config)


@pytest.mark.parametrize(
    ("world", "before", "disables", "after"),
    [
        ("2", None, True, "0"),
        ("2", "1", True, "1"),
        ("2", None, False, None),
        ("1", None, True, None),
        (None, None, True, None),
    ],
)
def test_graph_mixing_is_off_for_several_ranks_as_in_transformers(
    monkeypatch, world, before, disables, after
):
    for name, value in (("WORLD_SIZE", world), ("NCCL_GRAPH_MIXING_SUPPORT", before)):
        # set first, so that what the configuration sets is undone
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    ContinuousBatchingConfig(disable_nccl_graph_mixing=disables)
    assert os.environ.get("NCCL_GRAPH_MIXING_SUPPORT") == after
