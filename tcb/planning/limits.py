"""From settings and facts to limits: how many blocks fit in memory, how long a sequence may be.

It measures nothing: all figures of the machine and the model come in as `Facts`.
"""

import logging
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace

from tcb.planning.compile import Compilation, compilations
from tcb.planning.config import MAX_INT32, ContinuousBatchingConfig, check
from tcb.planning.groups import LayerGroup, block_elements, num_columns, pages_needed
from tcb.planning.request import Request

logger = logging.getLogger("ContinuousBatchingLogger")

# the host keeps a few words for every block: of tiny blocks, more than these are not asked for
MOST_BLOCKS = 2**22
_GIB = 2**30
# sizes of a batch to choose from when the user names none; the smaller ones if memory is small
_BATCH_TOKENS = (8192, 4096, 2048, 1024, 512, 256)
# on a CPU the activations of more tokens leave its caches: 16 prompts of 256 tokens take 11.8 s in
# batches of 1,024 and 13.4 s in one (SmolLM2-135M, two cores of an AMD EPYC)
_CPU_BATCH_TOKENS = (1024, 512, 256)
_NUM_REQUESTS = 1024
_SAFETY_MARGIN = {"fifo": 0.15, "prefill_first": 0.0}


@dataclass
class WorkloadHints:
    """What a user foretells of the requests to come; 0 is unknown. Fields as in transformers.

    `max_prompt_length` and `max_generated_length` count the tokens of one request.
    """

    max_prompt_length: int = 0
    max_generated_length: int = 0
    num_requests: int = 0


@dataclass(frozen=True, slots=True)
class Facts:
    """What is true of the machine, the model and the call; `resolve` reads nothing else.

    device_type         "cpu", "cuda", "xpu", "mps"
    free_memory         bytes free on the device once the model is there
    host_memory         bytes available in host memory; None: unknown
    element_size        bytes of one element of keys, values and activations
    groups              layer groups, from `group_layers`
    intermediate_size   width of the MLP; of all experts of one token together
    max_positions       positions that the model can take at all, as with a learned position table;
                        None: no such end
    keeps_logits        the model computes logits of the sampled tokens only (`logits_to_keep`)
    samples             logits are processed before a token is chosen
    needs_history       a logits processor reads the tokens generated so far
    """

    device_type: str
    free_memory: int
    host_memory: int | None
    element_size: int
    groups: tuple[LayerGroup, ...]
    hidden_size: int
    vocab_size: int
    intermediate_size: int
    max_positions: int | None = None
    keeps_logits: bool = True
    samples: bool = False
    needs_history: bool = False
    hints: WorkloadHints = field(default_factory=WorkloadHints)


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
    max_positions       positions that the model can take; None: no such end
    compilations        how mixed and decoding batches are compiled; None: they are not
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
    max_positions: int | None = None
    compilations: tuple[Compilation | None, Compilation | None] = (None, None)

    @property
    def what_allows_more(self) -> str:
        """Why no sequence has more than `max_length` positions, and what would allow more."""
        if self.max_length == self.max_positions:
            return "the model has no more positions that it can serve"
        return "more num_blocks or max_memory_percent allow more"

    def room_after(self, prompt_length: int) -> int:
        """Most new tokens after a prompt of this length; the last one is sampled, never
        computed.
        """
        return self.max_length - prompt_length + 1

    def has_ended(self, request: Request, generated: Sequence[int]) -> tuple[bool, str | None]:
        """Whether a request ends after these tokens, the last of which is no end token; and why, if
        it ends as failed: its own `stop` says so, or there is no room for all that it asked for.
        """
        stop = request.stop is not None and request.stop(request.prompt, generated)
        if stop:
            return True, stop if isinstance(stop, str) else None
        num_prompt, wanted = len(request.prompt), request.max_new_tokens
        room = self.room_after(num_prompt)
        if len(generated) < min(wanted, room):
            return False, None
        if wanted <= room:
            return True, None
        return True, (
            f"max_new_tokens is {wanted}, and after a prompt of {num_prompt} tokens "
            f"there is room for {room}, which were generated ({self.what_allows_more})"
        )

    def check_request(self, prompt_length: int, needs_history: bool = False) -> None:
        """Raise ValueError if the prompt of a request can never be computed, or if the request
        needs its history while batches fly.
        """
        if prompt_length > self.max_length:
            raise ValueError(
                f"prompt of {prompt_length} tokens needs {prompt_length} positions; accepted: at "
                f"most {self.max_length} ({self.what_allows_more})"
            )
        if needs_history and self.depth:
            raise ValueError(
                "the options of the request need its history, which is not complete while a batch "
                "flies; accepted: use_async_batching=False, or these options in the generation "
                "config"
            )


@dataclass(frozen=True, slots=True)
class BatchSize:
    """What the memory of a batch grows with: tokens, requests (table rows), batches in flight."""

    max_tokens: int
    max_requests: int
    depth: int
    return_logprobs: bool


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
        max_positions=facts.max_positions,
        return_logprobs=config.return_logprobs,
        deterministic=config.deterministic == "batch",
        compilations=compilations(config),
    )


def with_sizes(
    config: ContinuousBatchingConfig, limits: Limits, num_groups: int
) -> ContinuousBatchingConfig:
    """A copy of the settings in which every size is that of the limits; blocks are counted as the
    user does, all layers to a block.
    """
    return replace(
        deepcopy(config),
        page_size=limits.page_size,
        num_blocks=limits.num_blocks // num_groups,
        max_batch_tokens=limits.max_batch_tokens,
        max_requests_per_batch=limits.max_requests,
        safety_margin=limits.safety_margin,
        use_async_batching=bool(limits.depth),
    )


def _depth(config: ContinuousBatchingConfig, facts: Facts) -> int:
    """Batches still flying when the next is planned."""
    if config.use_async_batching is None:
        return int(facts.device_type in ("cuda", "xpu") and not facts.needs_history)
    if config.use_async_batching and facts.needs_history:
        raise ValueError(
            "use_async_batching is True, but a logits processor needs the history of its request "
            "(needs_history), which is not complete while a batch flies; accepted: None and False"
        )
    return int(config.use_async_batching)


def _batch_and_pool(
    config: ContinuousBatchingConfig, facts: Facts, depth: int
) -> tuple[BatchSize, int]:
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


def _batch_sizes(config: ContinuousBatchingConfig, facts: Facts, depth: int) -> list[BatchSize]:
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


def _what_is_missing(
    config: ContinuousBatchingConfig, facts: Facts, share: float, budget: int, size: BatchSize
) -> str:
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


def _host_blocks(config: ContinuousBatchingConfig, facts: Facts) -> int:
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


def memory_share(facts: Facts) -> float:
    """The share of free memory that is used when the user names none, as in transformers.

    Processed logits want more temporary tensors of the vocabulary's size, and a CPU's memory is
    shared with everything else.
    """
    if facts.device_type in ("cpu", "mps"):
        return 0.6
    return 0.8 if facts.samples else 0.9


def block_bytes(facts: Facts, page_size: int) -> int:
    """Bytes of one block of the pool."""
    return block_elements(facts.groups, page_size) * facts.element_size


def batch_bytes(facts: Facts, size: BatchSize) -> int:
    """Bytes that a forward pass and its static inputs take beside the blocks and their tables.

    A token has four hidden-sized tensors (stream, residual, normed, attention's output) and two
    more in fp32 inside the norms; in attention twice its keys and values (before and after the
    rotation), in the MLP gate, activation and product. Logits come as the model's dtype and fp32,
    once more where they are processed and once more for log-probabilities. All are summed, though
    not all live at once, because torch's caching allocator keeps what it has handed out.
    """
    row_elements = max(g.kv_heads * (g.dim + g.value_dim) for g in facts.groups)
    elements = 4 * facts.hidden_size + 3 * facts.intermediate_size + 2 * row_elements
    activation = elements * facts.element_size + 8 * facts.hidden_size
    # int64 id, position, sample index, output; one int64 slot for each group
    static = (32 + 8 * len(facts.groups)) * (size.depth + 1)
    logits_rows = size.max_requests if facts.keeps_logits else size.max_tokens
    copies = 1 + facts.samples + size.return_logprobs
    logit = facts.element_size + 4 * copies
    return size.max_tokens * (activation + static) + logits_rows * facts.vocab_size * logit


def pool_bytes(facts: Facts, page_size: int, num_blocks: int, size: BatchSize) -> int:
    """Bytes of the blocks and of the int32 block tables that are wide enough for them.

    Tables exist once for all requests, and once more, gathered, for each batch in flight.
    """
    longest = longest_sequence(facts, page_size, num_blocks)
    columns = sum(
        num_columns(group.window, page_size, size.max_tokens, longest) for group in facts.groups
    )
    tables = 4 * size.max_requests * columns * (size.depth + 2)
    return num_blocks * block_bytes(facts, page_size) + tables


def fitting_blocks(facts: Facts, page_size: int, size: BatchSize, budget: int) -> int:
    """The most blocks, up to `MOST_BLOCKS`, that fit in `budget` bytes beside a batch and their
    tables; 0 if none do.
    """
    left = budget - batch_bytes(facts, size)
    most = min(max(0, left) // block_bytes(facts, page_size), MOST_BLOCKS)
    return _last(most, lambda n: pool_bytes(facts, page_size, n, size) <= left)


def longest_sequence(facts: Facts, page_size: int, num_blocks: int) -> int:
    """The most positions that one sequence can have when all blocks of the pool are its own."""
    most = MAX_INT32 if facts.max_positions is None else min(facts.max_positions, MAX_INT32)
    return _last(most, lambda n: blocks_needed(facts.groups, page_size, n) <= num_blocks)


def blocks_needed(groups: Sequence[LayerGroup], page_size: int, length: int) -> int:
    """The fewest blocks with which a sequence of `length` positions can be computed."""
    return sum(pages_needed(length, group.window, page_size) for group in groups)


def _last(most: int, holds: Callable[[int], bool]) -> int:
    """The largest n up to `most` for which `holds`, which is true up to some n; 0 if for none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
