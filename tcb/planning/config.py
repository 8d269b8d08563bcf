"""Settings: one line each for default, accepted values, meaning, and why it may have no effect.

`check`, the warnings, `ContinuousBatchingConfig.read` and `settings_table` all read these lines.
`tcb.planning.limits` resolves them.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any

from tcb.planning.compile import compilations
from tcb.planning.rules import BOOLEANS, SHARES, Rule, integers, none_or, numbers, words

logger = logging.getLogger("ContinuousBatchingLogger")

# block ids, positions and context lengths are int32 on the device
MAX_INT32 = 2**31 - 1

_EAGER = "graphs are not part of this release; batches run without"
_WIDE = "block tables are always as wide as the longest sequence needs"
_OWN_KERNELS = "attention always runs on the kernels of this package"
_REFUSED = "what is not supported is refused by name, never dropped"


def _is_bool_or_pair(value: Any) -> bool:
    pair = value if isinstance(value, tuple | list) and len(value) == 2 else (value,)
    return all(isinstance(one, bool) for one in pair)


def _is_compile_config(value: Any) -> bool:
    return isinstance(value, dict) or (is_dataclass(value) and not isinstance(value, type))


_POSITIVE_SHARES = numbers("numbers in (0, 1]", lambda value: 0 < value <= 1)
_GIBIBYTES = numbers("numbers >= 0 (GiB)", lambda value: value >= 0)
_SECONDS = numbers("numbers > 0 (seconds)", lambda value: value > 0)
_GRAPHS = Rule("True, False and pairs of them", _is_bool_or_pair)
_NO_GRAPHS = (False, (False, False), [False, False])
_COMPILE = none_or(Rule("dicts and CompileConfig objects", _is_compile_config))


def setting(
    default: Any,
    rule: Rule,
    effect: str = "",
    *,
    ignored: str = "",
    granted: tuple = (),
    of_service: bool = False,
) -> Any:
    """A field of the config: it has an effect, or a reason why it is ignored; `of_service` ones are
    never read by an engine.

    A value of an ignored setting is logged unless it is the default or one of `granted`, which ask
    for what happens anyway.
    """
    about = {"rule": rule, "effect": effect, "ignored": ignored, "granted": granted}
    return field(default=default, metadata=about | {"of_service": of_service})


@dataclass
class ContinuousBatchingConfig:
    """The settings of continuous batching; names, order and defaults are those of transformers.

    None means that `resolve` finds a value. `block_size` is another name of `page_size`; to give
    both, with different values, is a ValueError (a `page_size` that is the default counts as not
    given). `check` raises for values out of range.

    `deterministic="batch"` is not in transformers. With it the attention of a token has the same
    bits whatever else is in its batch, in whatever order, and however its sequence was cut into
    chunks; long prompts and small batches get slower. It holds for the attention kernels of this
    package: torch's matrix products around them have rounding of their own, and on a CPU, where
    torch operations attend too, it has no effect, which is logged.
    """

    page_size: int = setting(256, integers(4, MAX_INT32), "tokens of a page")
    num_blocks: int | None = setting(
        None, none_or(integers(1)), "pages of all layers together; None: what memory allows"
    )
    max_batch_tokens: int | None = setting(
        None, none_or(integers(1, MAX_INT32)), "None: up to 8,192, on a CPU up to 1,024"
    )
    max_memory_percent: float | None = setting(
        None, none_or(_POSITIVE_SHARES), "of free memory; None: 0.9, sampling 0.8, on a CPU 0.6"
    )
    max_requests_per_batch: int | None = setting(
        None, none_or(integers(1)), "most that run; None: as many as the hints say, else 1,024"
    )
    max_blocks_per_request: int | None = setting(None, none_or(integers(0)), ignored=_WIDE)
    allow_block_sharing: bool = setting(True, BOOLEANS, "requests share equal prefixes")
    use_async_batching: bool | None = setting(
        None, none_or(BOOLEANS), "plan while a batch runs; None: on accelerators, without history"
    )
    use_cuda_graph: bool | tuple[bool, bool] | None = setting(
        None, none_or(_GRAPHS), ignored=_EAGER, granted=_NO_GRAPHS
    )
    q_padding_interval_size: int = setting(0, integers(0), ignored=_EAGER)
    kv_padding_interval_size: int = setting(0, integers(0), ignored=_EAGER)
    varlen_compile_config: Any = setting(
        None, _COMPILE, "`torch.compile` of batches with chunks; None: by the level"
    )
    decode_compile_config: Any = setting(
        None, _COMPILE, "`torch.compile` of decoding batches; None: by the level"
    )
    default_compile_level: int = setting(
        0, integers(0, 3), "0: none; 1: any size by one program; 2: tuned as well; 3: tuned by size"
    )
    scheduler_type: str = setting(
        "fifo", words("fifo", "prefill_first"), "which running requests a batch serves first"
    )
    safety_margin: float | None = setting(
        None, none_or(SHARES), "blocks kept from new requests; None: 0.15, prefill_first 0"
    )
    return_logprobs: bool = setting(False, BOOLEANS, "log-probabilities of the tokens")
    seed: int | None = setting(
        None,
        none_or(integers(-(2**63), 2**63 - 1)),
        "None: made of torch's random state",
        of_service=True,
    )
    auto_switch_to_flash: bool = setting(True, BOOLEANS, ignored=_OWN_KERNELS, granted=(False,))
    cpu_offload_space: float | None = setting(
        0.0, none_or(_GIBIBYTES), "for preempted requests; 0: recompute; None: all it may take"
    )
    cpu_offload_space_safety_threshold: float = setting(
        0.8, SHARES, "share of free host memory that offload may take"
    )
    max_queue_size: int = setting(
        0, integers(0), "most requests that wait; 0: no limit", of_service=True
    )
    per_request_processors: bool = setting(
        False, BOOLEANS, "not needed: requests may have options", of_service=True
    )
    drop_unsupported_processors: bool = setting(True, BOOLEANS, ignored=_REFUSED, granted=(False,))
    disable_nccl_graph_mixing: bool = setting(
        True, BOOLEANS, "with several ranks, sets NCCL_GRAPH_MIXING_SUPPORT=0 unless it is set"
    )
    cpu_group_timeout: float | None = setting(
        300.0, none_or(_SECONDS), "seconds to wait for another rank; None: torch's default"
    )
    use_default_compile_configs: bool | None = setting(
        None, none_or(BOOLEANS), "old name: True is level 3, False level 0"
    )
    max_cached_graphs: int | None = setting(None, none_or(integers(0)), ignored=_EAGER)
    block_size: int | None = setting(None, none_or(integers(4, MAX_INT32)), "old name of page_size")
    deterministic: str = setting(
        "off", words("off", "batch"), "batch: attention's bits ignore neighbours"
    )

    def __post_init__(self) -> None:
        if self.block_size is not None:
            if self.page_size == type(self).page_size:
                self.page_size = self.block_size
            _check_page_size(self)
        # as in transformers: NCCL reads it once, when the process group is made
        if self.disable_nccl_graph_mixing and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")

    @classmethod
    def read(cls, other: Any) -> "ContinuousBatchingConfig":
        """A config of our own from ours, from transformers', from a mapping, or from None.

        Everything is copied, `other` stays as it is. Raises TypeError for names that are no
        settings, unless they hold the default that their own class gives them.
        """
        if other is None:
            return cls()
        if isinstance(other, Mapping):
            return cls(**deepcopy(dict(other)))
        config, values = cls(), deepcopy(_values(other))
        if "page_size" not in values:
            # transformers up to 5.17 has `block_size`, with the meaning and default of `page_size`
            values["page_size"] = values.pop("block_size")
        for name, value in values.items():
            if name not in _SETTINGS:
                known = list(_SETTINGS)
                raise TypeError(f"{name} is {value!r}, which is unknown; accepted: {known}")
            setattr(config, name, value)
        return config

    def asks_engine_as(self, other: "ContinuousBatchingConfig") -> bool:
        """Whether an engine that serves the one serves the other."""
        return all(
            getattr(self, name) == getattr(other, name)
            for name, one in _SETTINGS.items()
            if not one.metadata["of_service"]
        )

    @property
    def cuda_graph_booleans(self) -> tuple[bool, bool]:
        """What `use_cuda_graph` asks for mixed and for decoding batches; None asks for neither."""
        asked = self.use_cuda_graph
        mixed, decoding = (bool(asked),) * 2 if isinstance(asked, bool | None) else asked
        return mixed, decoding

    @property
    def fallback_max_blocks_per_request(self) -> int:
        """What transformers takes for `max_blocks_per_request` without hints."""
        return 32


_SETTINGS: dict[str, Field] = {one.name: one for one in fields(ContinuousBatchingConfig)}

NO_EFFECT: dict[str, str] = {
    name: one.metadata["ignored"] for name, one in _SETTINGS.items() if one.metadata["ignored"]
}


def check(config: Any) -> None:
    """Raise for the first setting, in field order, whose value is not accepted.

    TypeError for a wrong type and for an attribute that is no setting, ValueError for a value out
    of range; both name the setting, its value and what is accepted. A setting that has no effect
    and asks for something is logged as a warning, once in the life of the process.
    """
    for name in vars(config):
        if name not in _SETTINGS:
            raise TypeError(f"{name} is no setting; accepted: {', '.join(_SETTINGS)}")
    for name, one in _SETTINGS.items():
        value, rule = getattr(config, name), one.metadata["rule"]
        shown = f"{name} is {value!r} of type {type(value).__name__}; accepted: {rule.accepted}"
        if not rule.is_kind(value):
            raise TypeError(shown)
        if not rule.is_in_range(value):
            raise ValueError(shown)
    _check_page_size(config)
    compilations(config)
    for name, reason in NO_EFFECT.items():
        value, one = getattr(config, name), _SETTINGS[name]
        if value != one.default and value not in one.metadata["granted"]:
            _warn_once(name, reason)


def ignored_settings() -> dict[str, str]:
    """The settings that have no effect, and why."""
    ignored = {name: one.metadata["ignored"] for name, one in _SETTINGS.items()}
    return {name: reason for name, reason in ignored.items() if reason}


def settings_table() -> Iterator[str]:
    """The settings as rows of a markdown table, header first."""
    yield "| setting | default | accepted | effect |"
    yield "|---|---|---|---|"
    for name, one in _SETTINGS.items():
        about = one.metadata
        effect = about["effect"] or f"none: {about['ignored']}"
        yield f"| `{name}` | `{one.default!r}` | {about['rule'].accepted} | {effect} |"


def _check_page_size(config: Any) -> None:
    """Raise ValueError where the two names of the page size disagree."""
    if config.block_size is not None and config.block_size != config.page_size:
        raise ValueError(
            f"block_size is {config.block_size} and page_size is {config.page_size}; "
            "accepted: one of the two, or the same value for both"
        )


@cache
def _warn_once(name: str, reason: str) -> None:
    logger.warning("%s has no effect: %s", name, reason)


def _values(other: Any) -> dict[str, Any]:
    """The settings that an object holds, by name, without unknown ones at their own default."""
    is_record = is_dataclass(other) and not isinstance(other, type)
    declared = {one.name: one for one in fields(other)} if is_record else {}
    names = dict.fromkeys([*declared, *getattr(other, "__dict__", ())])
    if isinstance(other, type) or not {"page_size", "block_size"} & names.keys():
        raise TypeError(
            f"continuous_batching_config is {other!r}; accepted: None, mappings, and "
            "ContinuousBatchingConfig objects of this package or of transformers"
        )
    values = {name: getattr(other, name) for name in names}
    return {
        name: value
        for name, value in values.items()
        if name in _SETTINGS or name not in declared or not _is_default(declared[name], value)
    }


def _is_default(one: Field, value: Any) -> bool:
    default = one.default if one.default_factory is MISSING else one.default_factory()
    return default is not MISSING and value == default
