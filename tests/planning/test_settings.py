"""What every setting accepts, and that settings without effect say so in the log."""

import logging
from dataclasses import dataclass, fields

import pytest

from tcb.planning import config as settings
from tcb.planning.config import NO_EFFECT, ContinuousBatchingConfig, check, settings_table


@dataclass
class CompileConfig:
    """Stands in for the class of transformers."""

    mode: str = "default"


ACCEPTED = {
    "page_size": [4, 16, 257],
    "num_blocks": [None, 1, 10**6],
    "max_batch_tokens": [None, 1, 8192],
    "max_memory_percent": [None, 1e-6, 0.5, 1, 1.0],
    "max_requests_per_batch": [None, 1, 4096],
    "max_blocks_per_request": [None, 0, 32],
    "allow_block_sharing": [True, False],
    "use_async_batching": [None, True, False],
    "use_cuda_graph": [None, True, False, (True, False), [False, False]],
    "q_padding_interval_size": [0, 64],
    "kv_padding_interval_size": [0, 16384],
    "varlen_compile_config": [None, {"mode": "default"}, CompileConfig()],
    "decode_compile_config": [None, {"mode": "default"}, CompileConfig()],
    "default_compile_level": [0, 1, 2, 3],
    "scheduler_type": ["fifo", "prefill_first"],
    "safety_margin": [None, 0, 0.0, 0.3, 1.0],
    "return_logprobs": [True, False],
    "seed": [None, 0, -1, 2**63 - 1],
    "auto_switch_to_flash": [True, False],
    "cpu_offload_space": [None, 0, 0.0, 2.5],
    "cpu_offload_space_safety_threshold": [0.0, 1.0],
    "max_queue_size": [0, 10],
    "per_request_processors": [True, False],
    "drop_unsupported_processors": [True, False],
    "disable_nccl_graph_mixing": [True, False],
    "cpu_group_timeout": [None, 0.5, 300],
    "use_default_compile_configs": [None, True, False],
    "max_cached_graphs": [None, 0, 32],
    "block_size": [None, 4, 32],
    "deterministic": ["off", "batch"],
}

# out of range, then of a wrong type
REFUSED = {
    "page_size": ([3, 0, -16, 2**31], [None, 16.0, "16", True]),
    "num_blocks": ([0, -1], [2.0, True]),
    "max_batch_tokens": ([0, 2**31], ["64"]),
    "max_memory_percent": ([0, 0.0, 1.01, -0.5, float("nan"), float("inf")], ["0.5", True]),
    "max_requests_per_batch": ([0, -4], [1.5]),
    "max_blocks_per_request": ([-1], [0.5]),
    "allow_block_sharing": ([], [None, 0, 1, "yes"]),
    "use_async_batching": ([], [0, "auto"]),
    "use_cuda_graph": ([], [1, (True,), (True, 1), "on"]),
    "q_padding_interval_size": ([-1], [None, 1.0]),
    "kv_padding_interval_size": ([-1], [None, 1.0]),
    "varlen_compile_config": ([], ["default", 1, CompileConfig]),
    "decode_compile_config": ([], ["default", 1, CompileConfig]),
    "default_compile_level": ([-1, 4], [None, True]),
    "scheduler_type": (["lifo", "FIFO", ""], [None, 1]),
    "safety_margin": ([-0.01, 1.01, float("nan")], ["0.1", False]),
    "return_logprobs": ([], [None, 1]),
    "seed": ([2**63, -(2**63) - 1], [1.0, "0", True]),
    "auto_switch_to_flash": ([], [None]),
    "cpu_offload_space": ([-1, float("inf")], ["1", True]),
    "cpu_offload_space_safety_threshold": ([-0.1, 1.1], [None]),
    "max_queue_size": ([-1], [None, 2.0]),
    "per_request_processors": ([], [None]),
    "drop_unsupported_processors": ([], [None]),
    "disable_nccl_graph_mixing": ([], [None]),
    "cpu_group_timeout": ([0, -1.0], ["300"]),
    "use_default_compile_configs": ([], [1]),
    "max_cached_graphs": ([-1], [True]),
    "block_size": ([3], [16.0]),
    "deterministic": (["on", ""], [None, True]),
}


def cases(table):
    return [(name, value) for name, values in table.items() for value in values]


@pytest.fixture(autouse=True)
def _nothing_was_logged_before():
    settings._warn_once.cache_clear()


def config_with(name, value):
    """A config with one field set as an attribute, past what the constructor does."""
    config = ContinuousBatchingConfig()
    setattr(config, name, value)
    if name == "block_size" and value is not None:
        config.page_size = value
    return config


def test_tables_of_this_test_name_every_field():
    names = [field.name for field in fields(ContinuousBatchingConfig)]
    assert list(ACCEPTED) == list(REFUSED) == names


@pytest.mark.parametrize(("name", "value"), cases(ACCEPTED))
def test_accepted(name, value):
    check(config_with(name, value))


@pytest.mark.parametrize(("name", "value"), cases({k: v[0] for k, v in REFUSED.items()}))
def test_out_of_range_is_a_value_error_with_name_value_and_range(name, value):
    # a bad block_size is a bad page_size, which comes first
    shown = "page_size" if name == "block_size" else name
    with pytest.raises(ValueError, match=f"^{shown} is ") as raised:
        check(config_with(name, value))
    assert f"{value!r} of type" in str(raised.value)
    assert "accepted: " in str(raised.value)


@pytest.mark.parametrize(("name", "value"), cases({k: v[1] for k, v in REFUSED.items()}))
def test_wrong_type_is_a_type_error_with_name_value_and_range(name, value):
    shown = "page_size" if name == "block_size" else name
    with pytest.raises(TypeError, match=f"^{shown} is ") as raised:
        check(config_with(name, value))
    assert f"{value!r} of type {type(value).__name__}" in str(raised.value)
    assert "accepted: " in str(raised.value)


def test_attribute_that_is_no_setting():
    with pytest.raises(TypeError, match=r"^max_batch_token is no setting; accepted: page_size, "):
        check(config_with("max_batch_token", 64))


def test_page_size_changed_after_block_size_was_given():
    config = ContinuousBatchingConfig(block_size=32)
    config.page_size = 64
    with pytest.raises(ValueError, match="block_size is 32 and page_size is 64; accepted: one of"):
        check(config)


LOGGED = {
    "max_blocks_per_request": 0,
    "use_cuda_graph": (True, False),
    "q_padding_interval_size": 64,
    "kv_padding_interval_size": 64,
    "auto_switch_to_flash": None,
    "drop_unsupported_processors": None,
    "max_cached_graphs": 8,
}


GRANTED = {
    "use_cuda_graph": (False, (False, False), [False, False]),
    "auto_switch_to_flash": (False,),
    "drop_unsupported_processors": (False,),
}


def test_table_of_no_effect_names_fields_and_is_all_tested():
    assert list(LOGGED) == list(NO_EFFECT)
    assert set(NO_EFFECT) < set(ACCEPTED)
    assert set(GRANTED) < set(NO_EFFECT)


@pytest.mark.parametrize(
    ("name", "value"), [item for item in LOGGED.items() if item[1] is not None]
)
def test_no_effect_is_logged_once(name, value, caplog):
    with caplog.at_level(logging.WARNING, logger="ContinuousBatchingLogger"):
        check(config_with(name, value))
        check(config_with(name, value))
    assert [record.name for record in caplog.records] == ["ContinuousBatchingLogger"]
    assert caplog.messages == [f"{name} has no effect: {NO_EFFECT[name]}"]


@pytest.mark.parametrize(("name", "value"), cases(GRANTED))
def test_what_happens_anyway_is_not_logged(name, value, caplog):
    check(config_with(name, value))
    assert caplog.messages == []


@pytest.mark.parametrize("name", [name for name in ACCEPTED if name not in NO_EFFECT])
def test_what_has_an_effect_is_not_logged(name, caplog):
    for value in ACCEPTED[name]:
        check(config_with(name, value))
    assert caplog.messages == []


def test_the_table_has_a_row_of_four_cells_for_every_setting():
    header, line, *rows = settings_table()
    assert header == "| setting | default | accepted | effect |"
    assert set(line) == set("|-")
    cells = [row.strip("| ").split(" | ") for row in rows]
    assert [(name, default) for name, default, *_ in cells] == [
        (f"`{field.name}`", f"`{field.default!r}`") for field in fields(ContinuousBatchingConfig)
    ]
    assert {
        name.strip("`"): effect for name, *_, effect in cells if effect.startswith("none: ")
    } == {name: f"none: {reason}" for name, reason in NO_EFFECT.items()}
    assert all(len(row) == 4 and all(row) for row in cells)
