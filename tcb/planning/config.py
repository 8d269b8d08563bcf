"""Settings: what a user may set, whether it is in range, and the limits that follow from it.

It does not know the model or the machine but for what `Facts` says, and holds no state.
"""

import logging
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

from tcb.planning.checks import NO_EFFECT, check, check_page_size
from tcb.planning.memory import (
    BatchSize,
    Facts,
    batch_bytes,
    block_bytes,
    fitting_blocks,
    longest_sequence,
    memory_share,
    pool_bytes,
)
from tcb.planning.request import WorkloadHints

__all__ = [
    "NO_EFFECT",
    "ContinuousBatchingConfig",
    "Facts",
    "Limits",
    "WorkloadHints",
    "check",
    "resolve",
]

logger = logging.getLogger("ContinuousBatchingLogger")

_GIB = 2**30
# sizes of a batch to choose from when the user names none; the smaller ones if memory is small
_BATCH_TOKENS = (8192, 4096, 2048, 1024, 512, 256)
# on a CPU the activations of more tokens leave its caches: 16 prompts of 256 tokens take 11.8 s in
# batches of 1,024 and 13.4 s in one (SmolLM2-135M, two cores of an AMD EPYC)
_CPU_BATCH_TOKENS = (1024, 512, 256)
_NUM_REQUESTS = 1024
_SAFETY_MARGIN = {"fifo": 0.15, "prefill_first": 0.0}


@dataclass
class ContinuousBatchingConfig:
    """The settings of continuous batching; names, order and defaults are those of transformers.

    None means that `resolve` finds a value. `block_size` is another name of `page_size`, tokens per
    page; to give both, with different values, is a ValueError (a `page_size` that is the default
    counts as not given). `num_blocks` counts blocks of all layers together. `cpu_offload_space` is
    in GiB, `cpu_group_timeout` in seconds. Fields in `NO_EFFECT` are accepted, and a value that
    asks for something else than what happens is logged. `check` raises for values out of range.

    `deterministic="batch"` is not in transformers. With it the attention of a token has the same
    bits whatever else is in its batch, in whatever order, and however its sequence was cut into
    chunks; long prompts and small batches get slower. It holds for the attention kernels of this
    package: torch's matrix products around them have rounding of their own, and on a CPU, where
    torch operations attend too, it has no effect, which is logged.
    """

    page_size: int = 256
    num_blocks: int | None = None
    max_batch_tokens: int | None = None
    max_memory_percent: float | None = None
    max_requests_per_batch: int | None = None
    max_blocks_per_request: int | None = None
    allow_block_sharing: bool = True
    use_async_batching: bool | None = None
    use_cuda_graph: bool | tuple[bool, bool] | None = None
    q_padding_interval_size: int = 0
    kv_padding_interval_size: int = 0
    varlen_compile_config: Any = None
    decode_compile_config: Any = None
    default_compile_level: int = 0
    scheduler_type: str = "fifo"
    safety_margin: float | None = None
    return_logprobs: bool = False
    seed: int | None = None
    auto_switch_to_flash: bool = True
    cpu_offload_space: float | None = 0.0
    cpu_offload_space_safety_threshold: float = 0.8
    max_queue_size: int = 0
    per_request_processors: bool = False
    drop_unsupported_processors: bool = True
    disable_nccl_graph_mixing: bool = True
    cpu_group_timeout: float | None = 300.0
    use_default_compile_configs: bool | None = None
    max_cached_graphs: int | None = None
    block_size: int | None = None
    deterministic: str = "off"

    def __post_init__(self):
        if self.block_size is not None:
            if self.page_size == type(self).page_size:
                self.page_size = self.block_size
            check_page_size(self)

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
        config = cls()
        values = deepcopy(_values(other))
        if "page_size" not in values:
            # transformers up to 5.17 has `block_size`, with the meaning and default of `page_size`
            values["page_size"] = values.pop("block_size")
        known = [field.name for field in fields(cls)]
        for name, value in values.items():
            if name not in known:
                raise TypeError(f"{name} is {value!r}, which is unknown; accepted: {known}")
            setattr(config, name, value)
        return config

    @property
    def cuda_graph_booleans(self) -> tuple[bool, bool]:
        """What `use_cuda_graph` asks for mixed and for decoding batches; None asks for neither."""
        asked = self.use_cuda_graph
        return (bool(asked),) * 2 if asked is None or isinstance(asked, bool) else tuple(asked)

    @property
    def fallback_max_blocks_per_request(self) -> int:
        """What transformers takes for `max_blocks_per_request` without hints."""
        return 32


@dataclass(frozen=True, slots=True)
class Limits:
    """What planning works within; nothing is left open.

    page_size           tokens per page
    num_blocks          blocks of the pool; a block holds the pages of one layer group
    max_batch_tokens    most tokens in one batch
    max_requests        most sequences that run, each with a table row, and most in one batch
    safety_margin       share of the blocks that new requests leave to running ones
    policy              "fifo" or "prefill_first"
    share_prefixes      whether blocks of equal content are shared
    depth               batches still flying when the next is planned, 0 or 1
    host_blocks         blocks of host memory for offload; 0: preempted sequences are recomputed
    max_length          most positions of one sequence
    return_logprobs     whether the log-probabilities of sampled tokens are wanted
    deterministic       whether the bits of attention must not depend on batch and chunks
    """

    page_size: int
    num_blocks: int
    max_batch_tokens: int
    max_requests: int
    safety_margin: float
    policy: str
    share_prefixes: bool
    depth: int
    host_blocks: int
    max_length: int
    return_logprobs: bool
    deterministic: bool = False


def resolve(config: ContinuousBatchingConfig, facts: Facts) -> Limits:
    """The limits that follow from the settings and the facts; the same for the same arguments.

    Raises what `check` raises, and ValueError where memory does not suffice or settings and facts
    contradict each other.
    """
    check(config)
    depth = _depth(config, facts)
    size, num_blocks = _batch_and_pool(config, facts, depth)
    margin = config.safety_margin
    return Limits(
        page_size=int(config.page_size),
        num_blocks=num_blocks,
        max_batch_tokens=size.max_tokens,
        max_requests=size.max_requests,
        safety_margin=float(_SAFETY_MARGIN[config.scheduler_type] if margin is None else margin),
        policy=config.scheduler_type,
        share_prefixes=config.allow_block_sharing,
        depth=depth,
        host_blocks=_host_blocks(config, facts),
        max_length=longest_sequence(facts, config.page_size, num_blocks),
        return_logprobs=config.return_logprobs,
        deterministic=config.deterministic == "batch",
    )


def _values(other):
    """The settings that an object holds, by name."""
    names = [field.name for field in fields(other)] if _is_record(other) else []
    names += [name for name in getattr(other, "__dict__", {}) if name not in names]
    if isinstance(other, type) or not {"page_size", "block_size"} & set(names):
        raise TypeError(
            f"continuous_batching_config is {other!r}; accepted: None, mappings, and "
            "ContinuousBatchingConfig objects of this package or of transformers"
        )
    return {name: getattr(other, name) for name in names if not _is_unknown_default(other, name)}


def _is_record(value):
    return is_dataclass(value) and not isinstance(value, type)


def _is_unknown_default(other, name):
    """Whether this is a field that we do not have, left at what its own class gives it."""
    if name in ContinuousBatchingConfig.__dataclass_fields__ or not _is_record(other):
        return False
    field = type(other).__dataclass_fields__.get(name)
    if field is None:
        return False
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return default is not MISSING and getattr(other, name) == default


def _depth(config, facts):
    """Batches still flying when the next is planned."""
    if config.use_async_batching is None:
        return int(facts.device_type in ("cuda", "xpu") and not facts.needs_history)
    if config.use_async_batching and facts.needs_history:
        raise ValueError(
            "use_async_batching is True, but a logits processor needs the history of its request "
            "(needs_history), which is not complete while a batch flies; accepted: None and False"
        )
    return int(config.use_async_batching)


def _batch_and_pool(config, facts, depth):
    """The size of a batch, and the blocks of the pool beside it.

    Where the user names no batch size it is the largest that leaves the pool what the user wants of
    it, or half of the memory.
    """
    share = config.max_memory_percent
    share = memory_share(facts) if share is None else share
    budget = int(facts.free_memory * share)
    page_size, num_groups = config.page_size, len(facts.groups)
    wanted = None if config.num_blocks is None else int(config.num_blocks) * num_groups
    sizes = _batch_sizes(config, facts, depth)
    for size in sizes:
        batch = batch_bytes(facts, size)
        if wanted is not None:
            if batch + pool_bytes(facts, page_size, wanted, size) <= budget:
                return size, wanted
        elif batch <= budget // 2 or size == sizes[-1]:
            num_blocks = fitting_blocks(facts, page_size, size, budget)
            if num_blocks >= num_groups:
                return size, num_blocks
    raise ValueError(_what_is_missing(config, facts, share, budget, sizes[-1]))


def _batch_sizes(config, facts, depth):
    """The batch sizes to try, the largest first; only one where the user names it."""
    tokens = config.max_batch_tokens
    default = _CPU_BATCH_TOKENS if facts.device_type == "cpu" else _BATCH_TOKENS
    requests = config.max_requests_per_batch
    if requests is None:
        requests = facts.hints.num_requests or _NUM_REQUESTS
    return [
        BatchSize(int(most), int(min(requests, most)), depth, config.return_logprobs)
        for most in (default if tokens is None else (tokens,))
    ]


def _what_is_missing(config, facts, share, budget, size):
    """Why neither blocks nor batches fit in `budget` bytes, and what would help."""
    least = len(facts.groups) * (config.num_blocks or 1)
    needed = batch_bytes(facts, size) + pool_bytes(facts, config.page_size, least, size)
    blocks = f"these {config.num_blocks} blocks" if config.num_blocks else "one page of every layer"
    helps = "smaller num_blocks, page_size, max_batch_tokens or max_requests_per_batch"
    if needed <= facts.free_memory:
        helps = f"max_memory_percent in [{needed / facts.free_memory:.4f}, 1], or {helps}"
    return (
        f"max_memory_percent is {share} and num_blocks is {config.num_blocks}: {budget} bytes of "
        f"the {facts.free_memory} that are free may be used, but {blocks} and batches of "
        f"{size.max_tokens} tokens need {needed}; accepted: {helps}"
    )


def _host_blocks(config, facts):
    """Blocks of host memory for offload, within the safe share of what the host has."""
    block = block_bytes(facts, config.page_size)
    threshold = config.cpu_offload_space_safety_threshold
    space, available = config.cpu_offload_space, facts.host_memory
    if space is None:
        if available is None:
            raise ValueError(
                "cpu_offload_space is None, but how much memory the host has is not known; "
                "accepted: numbers >= 0 (GiB)"
            )
        return int(available * threshold) // block
    wanted = int(space * _GIB)
    if space > 0 and wanted < block:
        raise ValueError(
            f"cpu_offload_space is {space}, which is {wanted} bytes and less than one block of "
            f"{block}; accepted: None, 0, and numbers >= {block / _GIB:.6f} (GiB)"
        )
    if available is not None and wanted > available * threshold:
        logger.warning(
            "cpu_offload_space is %s GiB; it is cut to %.3f GiB, the share of host memory that "
            "cpu_offload_space_safety_threshold = %s allows",
            space,
            available * threshold / _GIB,
            threshold,
        )
        wanted = int(available * threshold)
    return wanted // block
