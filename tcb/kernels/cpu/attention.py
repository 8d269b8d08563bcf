"""Attention over paged keys and values in torch operations: of chunks, and of single queries.

Single queries attend over lists of the keys they see, chunks without context as batches, and chunks
behind a context in turn, that context copied out of its pages. No keys are read that a query does
not see, but within a tile of queries. Tensors and options are those of the Triton launchers, which
check them. What follows from a step's integers alone is worked out once and remembered.
"""

from collections.abc import Hashable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tcb.kernels.cpu.chunks import Alone, Together, sort_chunks
from tcb.kernels.cpu.flat_views import read_tokens
from tcb.kernels.cpu.key_lists import KeyLists, attend_lists, build_lists
from tcb.kernels.cpu.step_cache import StepMemo

# queries of one tile where there is a mask: that of 1,024 queries and 8,192 keys takes 32 MiB
_MOST_QUERIES, _FEWEST_QUERIES = 1024, 64
# scores of one tile where they are written out: 64 MiB
_MOST_SCORES = 2**24

_memo = StepMemo()


@dataclass(frozen=True, slots=True)
class _Chunks:
    """How a batch is attended; `single` [served] are the tokens of `lists`, in the order of these.

    padding  what belongs to no sequence
    """

    padding: tuple[slice, ...]
    single: torch.Tensor | None
    lists: KeyLists | None
    together: list[Together]
    alone: list[Alone]


@dataclass(frozen=True, slots=True)
class _Options:
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    scale: float


@torch.no_grad()
def paged_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_len: torch.Tensor,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query a sequence, its own key and value in the cache; num_splits changes nothing here."""
    heads, num_extra = query.shape[1], int(sinks is not None)

    def build() -> KeyLists | None:
        lengths = context_len.tolist()
        count = [n if window is None else min(n, window) for n in lengths]
        first = [n - seen for n, seen in zip(lengths, count, strict=True)]
        return build_lists(key_cache, value_cache, block_table, first, count, heads, num_extra)

    settings = ("decode", heads, num_extra, window, *_layout(key_cache), *_layout(value_cache))
    lists = _memo.recall(settings, (block_table, context_len), build)
    shape = (*query.shape[:2], value_cache.shape[3])
    if lists is None:
        return query.new_zeros(shape) if out is None else out.zero_()
    result = attend_lists(
        lists,
        query if lists.order is None else query.index_select(0, lists.order),
        key_cache,
        value_cache,
        scale=query.shape[2] ** -0.5 if scale is None else scale,
        softcap=softcap,
        sinks=sinks,
    )
    if lists.place_of is not None:
        result = result.index_select(0, lists.place_of)
    elif lists.order is not None:
        result = result.new_zeros(shape).index_copy_(0, lists.order, result)
    return result.to(query.dtype) if out is None else out.copy_(result)


@torch.no_grad()
def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """New tokens of every sequence over its context in the cache and over themselves, causally."""
    heads, num_extra = query.shape[1], 1 + int(sinks is not None)

    def build() -> _Chunks:
        starts = query_start.tolist()
        single, together, alone = sort_chunks(
            starts, context_len.tolist(), block_table, key_cache.shape[1], window
        )
        lists = tokens = None
        if single:
            rows = block_table[[one.sequence for one in single]]
            first, count = [one.first for one in single], [one.count for one in single]
            lists = build_lists(key_cache, value_cache, rows, first, count, heads, num_extra)
            tokens = torch.tensor([one.token for one in single])
            tokens = tokens if lists.order is None else tokens[lists.order]
        padding = slice(0, starts[0]), slice(starts[-1], len(query))
        padding = tuple(part for part in padding if part.stop > part.start)
        return _Chunks(padding, tokens, lists, together, alone)

    layouts = *_layout(key_cache), *_layout(value_cache)
    settings = ("chunks", len(query), heads, num_extra, window, *layouts)
    chunks = _memo.recall(settings, (block_table, query_start, context_len), build)
    if out is None:
        out = query.new_empty(*query.shape[:2], value.shape[2])
        for part in chunks.padding:
            out[part] = 0
    options = _Options(window, softcap, sinks, query.shape[2] ** -0.5 if scale is None else scale)
    if chunks.lists is not None:
        _attend_single(chunks, query, key, value, key_cache, value_cache, options, out)
    for batch in chunks.together:
        _attend_together(batch, query, key, value, options, out)
    for chunk in chunks.alone:
        _attend_alone(chunk, query, key, value, key_cache, value_cache, options, out)
    return out


def _layout(cache: torch.Tensor) -> tuple[Hashable, ...]:
    return cache.shape, cache.stride(), cache.dtype


def _attend_single(chunks, query, key, value, key_cache, value_cache, options, out) -> None:
    """Sequences of one new token: over a list of context, and over itself."""
    query, key, value = (part.index_select(0, chunks.single) for part in (query, key, value))
    result = attend_lists(
        chunks.lists,
        query,
        key_cache,
        value_cache,
        scale=options.scale,
        softcap=options.softcap,
        sinks=options.sinks,
        own=(key, value),
    )
    out.index_copy_(0, chunks.single, result.to(out.dtype))


def _attend_together(batch: Together, query, key, value, options: _Options, out) -> None:
    """Chunks without context; padding stands behind a chunk's tokens, so none of them sees it."""
    shape = (batch.num_chunks, batch.width)
    if batch.start is not None:
        own = slice(batch.start, batch.start + batch.num_chunks * batch.width)
        query, key, value = (part[own].unflatten(0, shape) for part in (query, key, value))
        out[own].unflatten(0, shape).copy_(_attend(query, key, value, 0, options))
        return
    query, key, value = (
        part.index_select(0, batch.token).unflatten(0, shape) for part in (query, key, value)
    )
    result = _attend(query, key, value, 0, options).flatten(0, 1)
    out.index_copy_(0, batch.token[batch.real], result[batch.real])


def _attend_alone(
    chunk: Alone, query, key, value, key_cache, value_cache, options: _Options, out
) -> None:
    """One chunk behind the context that it sees."""
    own = slice(chunk.start, chunk.end)
    key, value = key[own], value[own]
    if chunk.count:
        key = _behind_context(chunk, key, key_cache)
        value = _behind_context(chunk, value, value_cache)
    out[own] = _attend(query[None, own], key[None], value[None], chunk.count, options)[0]


def _behind_context(chunk: Alone, own: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Keys or values of the context that a chunk sees, then the chunk's own."""
    joined = cache.new_empty(chunk.count + len(own), *own.shape[1:])
    read_tokens(cache, chunk.block, chunk.within, joined[: chunk.count])
    joined[chunk.count :] = own
    return joined.to(own.dtype)


def _attend(query, key, value, offset: int, options: _Options) -> torch.Tensor:
    """Causal attention of queries whose first stands at place `offset` of the keys.

    query       [chunks, queries, heads, dim], and so the result, of value_dim
    key, value  [chunks, keys, kv_heads, dim | value_dim]

    Tiles of queries read the keys from the first that their first query sees to their last query.
    """
    (chunks, queries, heads, dim), keys = query.shape, key.shape[1]
    window = None if options.window is None or options.window >= keys else options.window
    fused = options.softcap is None and options.sinks is None and dim == value.shape[3]
    tile = queries
    if not fused:
        tile = min(tile, max(1, _MOST_SCORES // max(1, chunks * heads * keys)))
    if offset or window:
        tile = min(tile, _MOST_QUERIES)
    if window:
        tile = min(tile, max(_FEWEST_QUERIES, window // 2))
    attend_tile = _attend_fused if fused else _attend_written_out
    if tile == queries:
        return attend_tile(query, key, value, offset, window, options)
    out = query.new_empty(chunks, queries, heads, value.shape[3])
    for lo in range(0, queries, tile):
        hi = min(lo + tile, queries)
        first = max(0, offset + lo + 1 - window) if window else 0
        seen = slice(first, offset + hi)
        tensors = query[:, lo:hi], key[:, seen], value[:, seen]
        out[:, lo:hi] = attend_tile(*tensors, offset + lo - first, window, options)
    return out


def _attend_fused(query, key, value, offset: int, window: int | None, options: _Options):
    """torch's own operation: what transformers runs on a CPU."""
    mask = None
    if offset or window:
        mask = _mask(query.shape[1], key.shape[1], offset, window, query.dtype)
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    causal = mask is None
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=causal, scale=options.scale, enable_gqa=True
    ).transpose(1, 2)


def _attend_written_out(query, key, value, offset: int, window: int | None, options: _Options):
    """What the fused operation lacks: softcap, sinks, values of another size. Sums in fp32."""
    chunks, queries, heads, _ = query.shape
    kv_heads = key.shape[2]
    score = query.float().unflatten(2, (kv_heads, heads // kv_heads)).permute(0, 2, 3, 1, 4)
    score = score @ key.float().permute(0, 2, 3, 1)[:, :, None] * options.scale
    if options.softcap is not None:
        score = score.div_(options.softcap).tanh_().mul_(options.softcap)
    score += _mask(queries, key.shape[1], offset, window, torch.float32)
    if options.sinks is None:
        weight = score.softmax(-1)
    else:
        sink = options.sinks.float().view(kv_heads, -1, 1, 1).expand(*score.shape[:4], 1)
        weight = torch.cat([score, sink], dim=-1).softmax(-1)[..., :-1]
    result = weight @ value.float().permute(0, 2, 1, 3)[:, :, None]
    return result.permute(0, 3, 1, 2, 4).reshape(chunks, queries, heads, -1).to(query.dtype)


def _mask(queries: int, keys: int, offset: int, window: int | None, dtype) -> torch.Tensor:
    """[queries, keys]: -inf where a query, the first of them at `offset`, does not see a key."""
    at, seen = torch.arange(offset, offset + queries)[:, None], torch.arange(keys)
    hidden = seen > at
    if window is not None:
        hidden |= seen <= at - window
    return torch.zeros(queries, keys, dtype=dtype).masked_fill_(hidden, float("-inf"))
