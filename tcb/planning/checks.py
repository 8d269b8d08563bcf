"""Which values a setting may have, and which settings change nothing in this release.

It does not know what a setting is for; it reads fields by name and writes nothing but the log.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from functools import cache
from math import isfinite
from numbers import Integral, Real
from typing import Any

from tcb.planning.memory import MAX_INT32

logger = logging.getLogger("ContinuousBatchingLogger")

_EAGER = "graphs and compilation are not part of this release; batches run eagerly"
_ALONE = "one process does all the work and talks to no other"

NO_EFFECT: dict[str, str] = {
    "max_blocks_per_request": "block tables are always as wide as the longest sequence needs",
    "use_cuda_graph": _EAGER,
    "q_padding_interval_size": _EAGER,
    "kv_padding_interval_size": _EAGER,
    "varlen_compile_config": _EAGER,
    "decode_compile_config": _EAGER,
    "default_compile_level": _EAGER,
    "auto_switch_to_flash": "attention always runs on the kernels of this package",
    "drop_unsupported_processors": "what is not supported is refused by name, never dropped",
    "disable_nccl_graph_mixing": _ALONE,
    "cpu_group_timeout": _ALONE,
    "use_default_compile_configs": _EAGER,
    "max_cached_graphs": _EAGER,
}

# values that differ from the default and ask for what happens anyway
_HAPPENS_ANYWAY: dict[str, tuple] = {
    "use_cuda_graph": (False, (False, False), [False, False]),
    "auto_switch_to_flash": (False,),
    "drop_unsupported_processors": (False,),
    "disable_nccl_graph_mixing": (False,),
    "cpu_group_timeout": (None,),
    "use_default_compile_configs": (False,),
}


def check(config: Any) -> None:
    """Raise for the first setting, in field order, whose value is not accepted.

    TypeError for a wrong type and for an attribute that is no setting, ValueError for a value out
    of range; both name the setting, its value and what is accepted. A setting that has no effect
    and asks for something is logged as a warning, once in the life of the process.
    """
    for name in vars(config):
        if name not in _RULES:
            raise TypeError(f"{name} is no setting; accepted: {', '.join(_RULES)}")
    for name, rule in _RULES.items():
        value = getattr(config, name)
        shown = f"{name} is {value!r} of type {type(value).__name__}; accepted: {rule.accepted}"
        if not rule.is_kind(value):
            raise TypeError(shown)
        if not rule.is_in_range(value):
            raise ValueError(shown)
    check_page_size(config)
    for name, reason in NO_EFFECT.items():
        value = getattr(config, name)
        if value != getattr(type(config), name) and value not in _HAPPENS_ANYWAY.get(name, ()):
            _warn_once(name, reason)


def check_page_size(config: Any) -> None:
    """Raise ValueError where the two names of the page size disagree."""
    if config.block_size is not None and config.block_size != config.page_size:
        raise ValueError(
            f"block_size is {config.block_size} and page_size is {config.page_size}; "
            "accepted: one of the two, or the same value for both"
        )


@cache
def _warn_once(name, reason):
    logger.warning("%s has no effect: %s", name, reason)


@dataclass(frozen=True, slots=True)
class _Rule:
    """What is accepted, in words and as two questions: is it the kind of value, is it in range."""

    accepted: str
    is_kind: Callable[[Any], bool]
    is_in_range: Callable[[Any], bool] = lambda value: True


def _integers(least, most=None):
    def is_kind(value):
        return isinstance(value, Integral) and not isinstance(value, bool)

    if most is None:
        return _Rule(f"integers >= {least}", is_kind, lambda value: value >= least)
    return _Rule(f"integers in [{least}, {most}]", is_kind, lambda value: least <= value <= most)


def _numbers(accepted, holds):
    def is_kind(value):
        return isinstance(value, Real) and not isinstance(value, bool)

    return _Rule(accepted, is_kind, lambda value: isfinite(value) and holds(value))


def _words(*words):
    text = " or ".join(repr(word) for word in words)
    return _Rule(text, lambda value: isinstance(value, str), lambda value: value in words)


def _none_or(rule):
    return _Rule(
        f"None and {rule.accepted}",
        lambda value: value is None or rule.is_kind(value),
        lambda value: value is None or rule.is_in_range(value),
    )


def _is_bool(value):
    return isinstance(value, bool)


def _is_bool_or_pair(value):
    pair = isinstance(value, tuple | list) and len(value) == 2
    return _is_bool(value) or (pair and all(map(_is_bool, value)))


def _is_compile_config(value):
    return isinstance(value, dict) or (is_dataclass(value) and not isinstance(value, type))


_BOOL = _Rule("True and False", _is_bool)
_SHARE = _numbers("numbers in [0, 1]", lambda value: 0 <= value <= 1)
_COMPILE = _none_or(_Rule("dicts and CompileConfig objects", _is_compile_config))

_RULES: dict[str, _Rule] = {
    "page_size": _integers(4, MAX_INT32),
    "num_blocks": _none_or(_integers(1)),
    "max_batch_tokens": _none_or(_integers(1, MAX_INT32)),
    "max_memory_percent": _none_or(_numbers("numbers in (0, 1]", lambda value: 0 < value <= 1)),
    "max_requests_per_batch": _none_or(_integers(1)),
    "max_blocks_per_request": _none_or(_integers(0)),
    "allow_block_sharing": _BOOL,
    "use_async_batching": _none_or(_BOOL),
    "use_cuda_graph": _none_or(_Rule("True, False and pairs of them", _is_bool_or_pair)),
    "q_padding_interval_size": _integers(0),
    "kv_padding_interval_size": _integers(0),
    "varlen_compile_config": _COMPILE,
    "decode_compile_config": _COMPILE,
    "default_compile_level": _integers(0, 3),
    "scheduler_type": _words("fifo", "prefill_first"),
    "safety_margin": _none_or(_SHARE),
    "return_logprobs": _BOOL,
    "seed": _none_or(_integers(-(2**63), 2**63 - 1)),
    "auto_switch_to_flash": _BOOL,
    "cpu_offload_space": _none_or(_numbers("numbers >= 0 (GiB)", lambda value: value >= 0)),
    "cpu_offload_space_safety_threshold": _SHARE,
    "max_queue_size": _integers(0),
    "per_request_processors": _BOOL,
    "drop_unsupported_processors": _BOOL,
    "disable_nccl_graph_mixing": _BOOL,
    "cpu_group_timeout": _none_or(_numbers("numbers > 0 (seconds)", lambda value: value > 0)),
    "use_default_compile_configs": _none_or(_BOOL),
    "max_cached_graphs": _none_or(_integers(0)),
    "block_size": _none_or(_integers(4, MAX_INT32)),
    "deterministic": _words("off", "batch"),
}
