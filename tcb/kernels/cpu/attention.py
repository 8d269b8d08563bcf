"""Attention over paged keys and values in torch operations: of chunks, and of single queries.

Single queries attend over lists of the keys they see, chunks without context as batches, and chunks
behind a context in turn, that context copied out of its pages. No keys are read that a query does
not see, but within a tile of queries. What follows from a step's integers alone is worked out once
and remembered for its other layers.
"""

from collections.abc import Hashable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tcb.kernels.cpu.chunks import Alone, Together, sort_chunks
from tcb.kernels.cpu.key_lists import KeyLists, Softmax, attend_lists, build_lists
from tcb.kernels.cpu.step_cache import StepMemo

# queries of one tile where there is a mask: that of 1,024 queries and 8,192 keys takes 32 MiB
_MOST_QUERIES, _FEWEST_QUERIES = 1024, 64
# scores of one tile where they are written out: 64 MiB
_MOST_SCORES = 2**24

_memo = StepMemo()


class _Batch(NamedTuple):
    """How a batch is attended; `single` [served] are the tokens of `lists`, in their order.

    is_padded  whether there are tokens of no sequence
    """

    is_padded: bool
    single: torch.Tensor | None
    lists: KeyLists | None
    together: list[Together]
    alone: list[Alone]


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

    settings = "decode", heads, num_extra, window, _layout(key_cache), _layout(value_cache)
    lists = _memo.recall(settings, (block_table, context_len), build)
    softmax = Softmax(query.shape[2] ** -0.5 if scale is None else scale, softcap, sinks)
    shape = (*query.shape[:2], value_cache.shape[3])
    out = query.new_zeros(shape) if out is None else out.zero_()
    if lists is not None:
        _attend_single(lists, lists.order, query, None, (key_cache, value_cache), softmax, out)
    return out


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

    def build() -> _Batch:
        starts, contexts = query_start.tolist(), context_len.tolist()
        page_size = key_cache.shape[1]
        single, together, alone = sort_chunks(starts, contexts, block_table, page_size, window)
        is_padded = starts[0] > 0 or starts[-1] < len(query)
        if not single:
            return _Batch(is_padded, None, None, together, alone)
        rows, tokens, first, count = map(list, zip(*single, strict=True))
        table = block_table[rows]
        lists = build_lists(key_cache, value_cache, table, first, count, heads, num_extra)
        order = slice(None) if lists is None or lists.order is None else lists.order
        return _Batch(is_padded, torch.tensor(tokens)[order], lists, together, alone)

    layouts = _layout(key_cache), _layout(value_cache)
    settings = "chunks", len(query), heads, num_extra, window, layouts
    batch = _memo.recall(settings, (block_table, query_start, context_len), build)
    softmax = Softmax(query.shape[2] ** -0.5 if scale is None else scale, softcap, sinks)
    caches = key_cache, value_cache
    if out is None:
        make = query.new_zeros if batch.is_padded else query.new_empty
        out = make((*query.shape[:2], value.shape[2]))
    if batch.lists is not None:
        _attend_single(batch.lists, batch.single, query, (key, value), caches, softmax, out)
    for chunks in batch.together:
        q, k, v = (
            _take(new, chunks.token).unflatten(0, chunks.shape) for new in (query, key, value)
        )
        result = _attend(q, k, v, 0, window, softmax).flatten(0, 1)
        if chunks.kept is None:
            out[chunks.token] = result
        else:
            place, token = chunks.kept
            out.index_copy_(0, token, result.index_select(0, place))
    for chunk in batch.alone:
        own = slice(chunk.start, chunk.end)
        keys, values = (
            _behind_context(chunk, new[own], cache)
            for new, cache in zip((key, value), caches, strict=True)
        )
        out[own] = _attend(query[None, own], keys, values, chunk.num_seen, window, softmax)[0]
    return out


def _layout(cache: torch.Tensor) -> Hashable:
    return cache.shape, cache.stride(), cache.dtype


def _take(rows: torch.Tensor, at: torch.Tensor | slice) -> torch.Tensor:
    return rows[at] if isinstance(at, slice) else rows.index_select(0, at)


def _attend_single(
    lists: KeyLists,
    token: torch.Tensor | None,
    query: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor] | None,
    caches: tuple[torch.Tensor, torch.Tensor],
    softmax: Softmax,
    out: torch.Tensor,
) -> None:
    """One query a list, those of `token`, or all; `own`: all tokens' keys and values."""
    if token is None:
        out.copy_(attend_lists(lists, query, *caches, softmax))
        return
    query = query.index_select(0, token)
    if own is not None:
        own = own[0].index_select(0, token), own[1].index_select(0, token)
    result = attend_lists(lists, query, *caches, softmax, own)
    out.index_copy_(0, token, result.to(out.dtype))


def _behind_context(chunk: Alone, own: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Keys or values [1, num_seen + tokens, ...] of the context that a chunk sees, then its own."""
    if chunk.num_seen:
        context = cache.index_select(0, chunk.pages).flatten(0, 1)
        context = context[chunk.skip : chunk.skip + chunk.num_seen]
        own = torch.cat([context.to(own.dtype), own])
    return own[None]


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offset: int,
    window: int | None,
    softmax: Softmax,
) -> torch.Tensor:
    """Causal attention of queries whose first stands at place `offset` of the keys.

    query       [chunks, queries, heads, dim], and so the result, of value_dim
    key, value  [chunks, keys, kv_heads, dim | value_dim]

    Tiles of queries read the keys from the first that their first query sees to their last query.
    """
    (chunks, queries, heads, dim), keys = query.shape, key.shape[1]
    window = None if window is None or window >= keys else window
    fused = softmax.softcap is None and softmax.sinks is None and dim == value.shape[3]
    attend_tile = _attend_fused if fused else _attend_written_out
    tile = queries
    if not fused:
        tile = min(tile, max(1, _MOST_SCORES // max(1, chunks * heads * keys)))
    if offset or window:
        tile = min(tile, _MOST_QUERIES)
    if window:
        tile = min(tile, max(_FEWEST_QUERIES, window // 2))
    results = []
    for lo in range(0, queries, tile):
        hi = min(lo + tile, queries)
        first = max(0, offset + lo + 1 - window) if window else 0
        seen = slice(first, offset + hi)
        tensors = query[:, lo:hi], key[:, seen], value[:, seen]
        results.append(attend_tile(*tensors, offset + lo - first, window, softmax))
    return results[0] if len(results) == 1 else torch.cat(results, 1)


def _attend_fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offset: int,
    window: int | None,
    softmax: Softmax,
) -> torch.Tensor:
    """torch's own operation: what transformers runs on a CPU."""
    mask = None
    if offset or window:
        mask = _mask(query.shape[1], key.shape[1], offset, window, query.dtype)
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    causal = mask is None
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=causal, scale=softmax.scale, enable_gqa=True
    ).transpose(1, 2)


def _attend_written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offset: int,
    window: int | None,
    softmax: Softmax,
) -> torch.Tensor:
    """What the fused operation lacks: softcap, sinks, values of another size. Sums in fp32."""
    chunks, queries, heads, _ = query.shape
    kv_heads = key.shape[2]
    score = query.float().unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)
    score = score @ key.float().permute(0, 2, 3, 1)[:, :, None] * softmax.scale
    if softmax.softcap is not None:
        score = score.div_(softmax.softcap).tanh_().mul_(softmax.softcap)
    score += _mask(queries, key.shape[1], offset, window, torch.float32)
    if softmax.sinks is not None:
        sink = softmax.sinks.float().view(kv_heads, -1, 1, 1).expand(*score.shape[:4], 1)
        score = torch.cat([score, sink], dim=-1)
    weight = score.softmax(-1)[..., : key.shape[1]]
    result = weight @ value.float().permute(0, 2, 1, 3)[:, :, None]
    return result.permute(0, 3, 1, 2, 4).reshape(chunks, queries, heads, -1).to(query.dtype)


def _mask(
    queries: int, keys: int, offset: int, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """[queries, keys]: -inf where a query, the first of them at `offset`, does not see a key."""
    at, seen = torch.arange(offset, offset + queries)[:, None], torch.arange(keys)
    hidden = seen > at
    if window is not None:
        hidden |= seen <= at - window
    return torch.zeros(queries, keys, dtype=dtype).masked_fill_(hidden, float("-inf"))
