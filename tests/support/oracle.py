"""Paged problems full of poison, and what their rows come to in fp64 and in the same dtype.

What attention means is `tcb.kernels.reference`; here keys are dense, and pages are only filled.
"""

from dataclasses import dataclass

import torch

from tcb.kernels import reference

INF = float("inf")


@dataclass(frozen=True, slots=True)
class Case:
    """One attention problem; sequences are (positions in the cache, new tokens).

    decode: the one query of a sequence is its last cached position, and there are no new tokens.
    sinks: None, or the logit that all heads share plus their index / 8. magnitude scales queries.
    packed: query, key and value are slices of one tensor, and the two caches views of one pool.
    spare: columns of the block table beyond those needed. wild: some dead entries of it name no
    block of the cache, nor of any memory there is.
    """

    sequences: tuple[tuple[int, int], ...]
    decode: bool = False
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    value_dim: int = 0
    page_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: float | None = None
    dtype: torch.dtype = torch.float32
    scale: float | None = None
    magnitude: float = 1.0
    packed: bool = False
    padding: int = 0
    num_splits: int | None = None
    spare: int = 0
    wild: bool = False

    def __str__(self) -> str:
        shown = ["+".join(f"{context}:{chunk}" for context, chunk in self.sequences)]
        shown.append(f"h{self.heads}/{self.kv_heads}-d{self.dim}")
        names = "value_dim", "page_size", "window", "softcap", "sinks", "scale", "num_splits"
        for name in names:
            if getattr(self, name) != Case.__dataclass_fields__[name].default:
                shown.append(f"{name}{getattr(self, name)}")
        if self.magnitude != 1.0:
            shown.append(f"x{self.magnitude:g}")
        shown += ["packed"] * self.packed + [f"pad{self.padding}"] * bool(self.padding)
        return "-".join([*shown, str(self.dtype).removeprefix("torch.")])


@dataclass(frozen=True, slots=True)
class Problem:
    """The tensors of a case, what its rows must come to, and how far off they may be."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    query_start: torch.Tensor
    context_len: torch.Tensor
    sinks: torch.Tensor | None
    expected: torch.Tensor
    tolerance: float

    @property
    def chunks(self) -> tuple[torch.Tensor, ...]:
        """The tensors of `paged_attention`, in its order."""
        return (
            self.query,
            self.key,
            self.value,
            self.key_cache,
            self.value_cache,
            self.block_table,
            self.query_start,
            self.context_len,
        )


def score(query, keys, case, dtype):
    """Scores [heads, tokens, length] in `dtype`, softcap included, before any mask."""
    factors = {"softcap": case.softcap, "scale": case.scale}
    return reference.scores(query.to(dtype), keys.to(dtype), **factors)


def attend(query, keys, values, case, sinks, dtype):
    """Attention of the last rows of a sequence over all its keys, computed in `dtype`.

    query [tokens, heads, dim], keys [length, kv_heads, dim], values [length, kv_heads, value_dim];
    returns [tokens, heads, value_dim] in `dtype`.
    """
    dense = (tensor.to(dtype) for tensor in (query, keys, values))
    masks = {"window": case.window, "sinks": sinks}
    return reference.attend(*dense, **masks, softcap=case.softcap, scale=case.scale)


def tolerance(case, expected, same_dtype, magnitude, largest_score):
    """At most twice the error of the same-dtype reference, and the rounding of scores and sums.

    A result is a weighted mean of values: its rounding is relative to the mean of their absolute
    values, `magnitude`. With S the largest score, the exponent of a weight is in fp32 a difference
    (eps/2 * 2S) of two products (eps/2 * S each): an error of 2 eps S. It moves a weight by as
    much relatively and the mean, whose weights sum to one, by at most twice that. A softcap, as
    cap * (1 - 2 / (1 + e^2x)), has three more roundings, each of up to eps * cap.
    """
    score_band = 2 * largest_score + (3 * case.softcap if case.softcap is not None else 0)
    band = torch.finfo(case.dtype).eps + 2 * torch.finfo(torch.float32).eps * score_band
    if not expected.numel():
        return 0.0
    error = (same_dtype.double() - expected).abs().max().item()
    return 2 * error + band * magnitude.max().item()


def num_columns(case: Case) -> int:
    """Columns of the block table: a page each, or a ring for the window and the longest chunk."""
    longest = max(context + chunk for context, chunk in case.sequences)
    pages = -(-longest // case.page_size)
    if case.window is not None:
        chunk = max(chunk for _, chunk in case.sequences)
        pages = min(pages, (case.window - 1 + max(chunk, 1) - 1) // case.page_size + 2)
    return max(pages, 1) + case.spare


def build(case: Case, device: torch.device) -> Problem:
    """Make the tensors of a case.

    All of the pool is NaN or Inf but the cached positions that the first query of a sequence sees
    and later ones, guard blocks on either side of the pool too; dead entries of a table are -1,
    name a poisoned block or, where wild, none. Padding tokens are NaN and Inf.
    """
    generator = torch.Generator().manual_seed(len(case.sequences) * 7919 + case.dim)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(case.dtype).to(device)

    value_dim, columns = case.value_dim or case.dim, num_columns(case)
    blocks = len(case.sequences) * columns + 2
    caches = poisoned_caches(case, blocks, value_dim, device)
    free = torch.randperm(blocks, generator=generator).tolist()
    table = torch.full((len(case.sequences), columns), -1, dtype=torch.int32, device=device)
    table[:, 1::2] = free.pop()
    if case.wild:
        table[:, 2::3] = 2**31 - 1
    sinks = None
    if case.sinks is not None:
        sinks = case.sinks + torch.arange(case.heads, device=device) / 8
    new, checks, largest_score = [], [], 0.0
    for row, (context, chunk) in enumerate(case.sequences):
        query = normal(1 if case.decode else chunk, case.heads, case.dim) * case.magnitude
        keys = normal(context + chunk, case.kv_heads, case.dim)
        values = normal(context + chunk, case.kv_heads, value_dim)
        store(case, context, keys, values, caches, table[row], free)
        new.append((query, keys[context:], values[context:]))
        exact = attend(query, keys, values, case, sinks, torch.float64)
        rounded = attend(query, keys, values, case, sinks, case.dtype)
        checks.append((exact, rounded, attend(query, keys, values.abs(), case, sinks, exact.dtype)))
        scores = score(query, keys, case, torch.float64)
        largest_score = max(largest_score, scores.abs().max().item() if scores.numel() else 0.0)
    poison = normal(case.padding, case.heads + 2 * case.kv_heads, max(case.dim, value_dim))
    query, key, value = (poison * INF).split([case.heads, case.kv_heads, case.kv_heads], 1)
    new.append((query[..., : case.dim], key[..., : case.dim], value[..., :value_dim]))
    new = [torch.cat(parts) for parts in zip(*new, strict=True)]
    if case.packed and not case.decode:
        new = torch.cat(new, 1).split([case.heads, case.kv_heads, case.kv_heads], 1)
    expected, same_dtype, magnitude = (torch.cat(parts) for parts in zip(*checks, strict=True))
    chunks = [0, *(chunk for _, chunk in case.sequences)]
    contexts = [context for context, _ in case.sequences]
    return Problem(
        *new,
        *caches,
        table,
        torch.tensor(chunks, device=device).cumsum(0).int(),
        torch.tensor(contexts, dtype=torch.int32, device=device),
        sinks,
        expected,
        tolerance(case, expected, same_dtype, magnitude, largest_score),
    )


def store(case, context, keys, values, caches, table_row, free):
    """Put what is visible of a context into blocks taken from `free`, and name them in its row."""
    first_query = context - case.decode
    first = 0 if case.window is None else max(0, first_query - case.window + 1)
    taken = {}
    for position in range(first, context):
        page, slot = divmod(position, case.page_size)
        if page not in taken:
            taken[page] = free.pop()
            table_row[page % len(table_row)] = taken[page]
        caches[0][taken[page], slot] = keys[position]
        caches[1][taken[page], slot] = values[position]


def poisoned_caches(case, blocks, value_dim, device):
    """Key and value caches full of NaN and Inf, a guard block before and one after each."""
    shape = blocks + 2, case.page_size, case.kv_heads
    if case.packed:
        pool = torch.empty(*shape, case.dim + value_dim, dtype=case.dtype, device=device)
        caches = pool.split([case.dim, value_dim], 3)
    else:
        caches = [
            torch.empty(*shape, width, dtype=case.dtype, device=device)
            for width in (case.dim, value_dim)
        ]
    for cache in caches:
        cache[0::2], cache[1::2] = float("nan"), INF
    return [cache[1:-1] for cache in caches]


def assert_close(out: torch.Tensor, problem: Problem) -> None:
    """Every row finite, then within tolerance: a comparison with NaN would pass in silence."""
    rows = out[: len(problem.expected)]
    assert torch.isfinite(rows).all(), f"{int((~torch.isfinite(rows)).sum())} values not finite"
    if rows.numel():
        error = (rows.double() - problem.expected).abs().max().item()
        assert error <= problem.tolerance, f"error {error:.3g} > {problem.tolerance:.3g}"


def spread(tensor: torch.Tensor, axis: int, stride: int) -> torch.Tensor:
    """A copy of a tensor, `stride` elements apart along one axis; the rest is never touched."""
    strides = list(tensor.stride())
    strides[axis] = stride
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, strides, strict=True))
    return tensor.new_empty(reach + 1).as_strided(tensor.shape, strides).copy_(tensor)
