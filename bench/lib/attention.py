"""The attention workloads, the least that each must move and compute, and tensors to run them on.

The floors, for one layer, with every byte moved once:

    bytes = element size * (dim + value_dim) * (kv_heads * keys read + heads * query tokens)
    FLOP  = 2 * (dim + value_dim) * heads * (pairs of a query and a key that the mask keeps)

The keys read are the positions that at least one new token sees: a window leaves the last ones.
A launch takes at least max(bytes / bandwidth, FLOP / rate). It knows no kernel and no comparator.
"""

from dataclasses import dataclass, replace

import torch

PAGE_SIZE = 256
DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Workload:
    """One layer's attention in one batch; sequences are (positions cached before, new tokens).

    Sequences of one new token come first. They decode: their new position is in the cache when
    attention begins. The others are chunks, whose own keys and values are given beside the cache.
    """

    name: str
    sequences: tuple[tuple[int, int], ...]
    window: int | None = None
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    page_size: int = PAGE_SIZE

    @property
    def tokens(self) -> int:
        return sum(new for _, new in self.sequences)

    @property
    def num_decodes(self) -> int:
        return sum(new == 1 for _, new in self.sequences)

    @property
    def num_chunks(self) -> int:
        return len(self.sequences) - self.num_decodes

    @property
    def uniform(self) -> bool:
        """All sequences alike: they can be laid out as one dense batch."""
        return len(set(self.sequences)) == 1

    def first_key(self, context: int) -> int:
        """The first position that the first new token behind `context` positions sees."""
        return 0 if self.window is None else max(0, context - self.window + 1)

    def keys_seen(self, context: int, new: int) -> int:
        """Positions that at least one of `new` tokens behind `context` positions sees."""
        return context + new - self.first_key(context)

    def bytes_moved(self, element_size: int = DTYPE.itemsize) -> int:
        """The byte floor, as in the formula above."""
        keys = sum(self.keys_seen(*pair) for pair in self.sequences)
        return element_size * 2 * self.dim * (self.kv_heads * keys + self.heads * self.tokens)

    def flop(self) -> int:
        """The FLOP floor, as in the formula above."""
        pairs = 0
        for context, new in self.sequences:
            lengths = range(context + 1, context + new + 1)
            limit = self.window or lengths[-1]
            pairs += sum(min(length, limit) for length in lengths)
        return 4 * self.dim * self.heads * pairs

    def columns(self) -> int:
        """Columns of the block table: every page, or a ring for the window and longest chunk."""
        pages = -(-max(context + new for context, new in self.sequences) // self.page_size)
        if self.window is None:
            return pages
        longest = max(new for _, new in self.sequences)
        return min(pages, (self.window - 1 + longest - 1) // self.page_size + 2)


# one layer of 32 query and 8 key-value heads of 128, as of a Llama of 8B
WORKLOADS = (
    Workload("decode 64 x 4096", ((4095, 1),) * 64),
    Workload("prefill 8 x 2048", ((0, 2048),) * 8),
    Workload("mixed 60 x 4096 + 2048 at 2048", (*((4095, 1),) * 60, (2048, 2048))),
    Workload("decode 64 x 32768, window 1024", ((32767, 1),) * 64, window=1024),
    Workload("decode 1 x 4096", ((4095, 1),)),
    Workload("decode 1 x 32768", ((32767, 1),)),
    Workload("prefill 1 x 4096, window 1024", ((0, 4096),), window=1024),
)


def choose(small: bool) -> tuple[Workload, ...]:
    """All workloads; or one of each kind, reduced."""
    return tuple(map(reduced, (WORKLOADS[1], *WORKLOADS[2:4]))) if small else WORKLOADS


def reduced(workload: Workload) -> Workload:
    """The same workload, so small that the interpreter ends in a second."""
    sequences = [(context // 128, max(1, new // 128)) for context, new in workload.sequences[-3:]]
    window = workload.window and max(2, workload.window // 64)
    return replace(
        workload,
        sequences=tuple(sequences),
        window=window,
        heads=4,
        kv_heads=2,
        dim=16,
        name=f"{workload.name}, reduced",
        page_size=16,
    )


@dataclass(frozen=True, slots=True)
class Tensors:
    """What one call reads.

    query         [tokens, heads, dim]
    new_key, new_value  [tokens, kv_heads, dim], of the new tokens
    keys, values  [kept, kv_heads, dim], contiguous, for comparators that know no pages: of each
                  sequence the positions from `first_key` on, which begin at key_start
    caches        [blocks, page_size, kv_heads, dim]; they hold the chunks' own positions too
    context_len   positions before the new tokens         total_len           with them
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    new_key: torch.Tensor
    new_value: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    query_start: torch.Tensor
    key_start: torch.Tensor
    context_len: torch.Tensor
    total_len: torch.Tensor


def needed_bytes(workload: Workload) -> int:
    """Memory of one set of tensors: the keys and values twice, and little else."""
    return 3 * workload.bytes_moved()


def build(
    workload: Workload, device: torch.device, dtype: torch.dtype = DTYPE, seed: int = 0
) -> Tensors:
    """Random tensors of a workload, drawn on the device; every block somewhere else in the pool."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    def integers(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    sequences, page_size, columns = workload.sequences, workload.page_size, workload.columns()
    blocks = torch.randperm(len(sequences) * columns, generator=generator, device=device)
    table = blocks.view(len(sequences), columns).int()
    kept = [workload.keys_seen(*pair) for pair in sequences]
    head = workload.kv_heads, workload.dim
    keys, values = normal(sum(kept), *head), normal(sum(kept), *head)
    shape = blocks.numel(), page_size, *head
    pools = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)]
    newest, begin = [], 0
    for row, ((context, new), count) in enumerate(zip(sequences, kept, strict=True)):
        position = torch.arange(workload.first_key(context), context + new, device=device)
        block = table[row, position // page_size % columns].long()
        slot = block * page_size + position % page_size
        for pool, source in zip(pools, (keys, values), strict=True):
            pool.view(-1, *head)[slot] = source[begin : begin + count]
        newest.append(slice(begin + count - new, begin + count))
        begin += count
    starts = [0], [0]
    for (_, new), count in zip(sequences, kept, strict=True):
        starts[0].append(starts[0][-1] + new)
        starts[1].append(starts[1][-1] + count)
    return Tensors(
        normal(workload.tokens, workload.heads, workload.dim),
        keys,
        values,
        torch.cat([keys[part] for part in newest]),
        torch.cat([values[part] for part in newest]),
        *pools,
        table,
        integers(starts[0]),
        integers(starts[1]),
        integers([context for context, _ in sequences]),
        integers([context + new for context, new in sequences]),
    )
