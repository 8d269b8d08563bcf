"""How many blocks fit in memory, and how long a sequence fits in the blocks.

It does not know who asks, and it measures nothing: all figures come in as `Facts`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tcb.planning.groups import LayerGroup, block_elements, num_columns, pages_needed
from tcb.planning.request import WorkloadHints

# block ids, positions and context lengths are int32 on the device
MAX_INT32 = 2**31 - 1
# the host keeps a few words for every block: of tiny blocks, more than these are not asked for
MOST_BLOCKS = 2**22


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
class BatchSize:
    """What the memory of a batch grows with: tokens, requests (table rows), batches in flight."""

    max_tokens: int
    max_requests: int
    depth: int
    return_logprobs: bool


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
