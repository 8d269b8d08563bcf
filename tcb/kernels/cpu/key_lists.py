"""Attention of single queries, each over its own list of cached keys, in torch operations.

    out[r] = sum_j softmax_j(scale * query[r] . key[list[r, j]]) value[list[r, j]]

A row r is one query head of one sequence. Its list names only keys that the row sees, so what a
dead slot holds cannot reach a result. Scores are a product sampled at the lists, results weighted
bags of rows, both in fp32: over the pages where they lie, or over fp32 copies of the pages in use.
Lists of similar length are padded to one width, with a key that they see and the score -inf, so
that softmax runs over rectangles.
"""

import threading
import warnings
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

# a further rectangle pays where it saves this many padded entries, as each takes about 15 ns on one
# core (AMD EPYC, AVX2) and one more softmax 10 microseconds, and its lists are this much shorter
_WORTHWHILE, _SHORTER = 1000, 0.75
# elements that are cast to fp32 at a time
_CAST_AT_ONCE = 2**17


class Softmax(NamedTuple):
    """How products of queries and keys become weights; `sinks` [heads] or None."""

    scale: float
    softcap: float | None
    sinks: torch.Tensor | None


class KeyLists(NamedTuple):
    """The lists of a batch, with scratch for its scores; entries are stored row by row.

    order       [served] the sequences that see a key, in the order of the rows; None: all of them
    scores      [rows, keys] sparse, its values are `score` [entries]
    mask        [entries] 0, or -inf for padding           weight     [entries] what softmax writes
    value_row   [entries] row of the value table           row_start  [rows + 1] first entry of each
    rectangles  pairs of views of `score` and `weight`, [rows of one width, width]
    extra       [rows] entries of each column that stands for no key of the cache
    tables      shapes [rows, dim | value_dim] of the caches as tables of heads
    used        [blocks] blocks to copy; None: the caches are read in place
    """

    order: torch.Tensor | None
    scores: torch.Tensor
    score: torch.Tensor
    mask: torch.Tensor
    weight: torch.Tensor
    value_row: torch.Tensor
    row_start: torch.Tensor
    rectangles: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    extra: tuple[torch.Tensor, ...]
    tables: tuple[tuple[int, int], ...]
    used: torch.Tensor | None


def build_lists(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    first: Sequence[int],
    count: Sequence[int],
    heads: int,
    num_extra: int,
) -> KeyLists | None:
    """Lists of the positions [first[i], first[i] + count[i]) of sequence i; None: all are empty.

    block_table  [sequences, columns]     heads  query heads
    num_extra    columns for no key of the cache, at the end of each row
    """
    served = [i for i, n in enumerate(count) if n]
    if not served:
        return None
    served, spans = _cut_rectangles(served, count, heads)
    sizes = [hi - lo for lo, hi in spans]
    widths = [max(count[i] for i in served[lo:hi]) + num_extra for lo, hi in spans]
    blocks, page_size, kv_heads, _ = key_cache.shape

    # [served, 1] first and last position and first page; [served, pages] blocks of the visible ones
    index = torch.tensor(served)[:, None]
    low = torch.tensor(first)[index]
    high = low + torch.tensor(count)[index] - 1
    first_page, last_page = low // page_size, high // page_size
    page = first_page + torch.arange(int((last_page - first_page).max()) + 1)
    page = page.minimum(last_page) % block_table.shape[1]
    # a sequence longer than its table has blocks reads something, but nothing outside the cache
    block_of = block_table[index, page].long().clamp_(0, blocks - 1)

    key_steps, value_steps, used = _head_steps(key_cache), _head_steps(value_cache), None
    if not _is_readable_in_place(key_cache, value_cache, max(widths)):
        used, block_of = block_of.unique(return_inverse=True)
        key_steps = value_steps = (page_size * kv_heads, kv_heads, 1)
        # enough rows for the longest list, see `_is_readable_in_place`
        used = used.repeat(-(-max(widths) // (used.numel() * key_steps[0])))
        blocks = used.numel()
    steps = [key_steps] if key_steps == value_steps else [key_steps, value_steps]
    rows: list[list[torch.Tensor]] = [[] for _ in steps]
    masks = []
    for (lo, hi), width in zip(spans, widths, strict=True):
        column = torch.arange(width)
        position = (low[lo:hi] + column).minimum(high[lo:hi])
        block = block_of[lo:hi].gather(1, position // page_size - first_page[lo:hi])
        for step, of_table in zip(steps, rows, strict=True):
            token = block * step[0] + position % page_size * step[1]
            head = (torch.arange(kv_heads) * step[2]).repeat_interleave(heads // kv_heads)
            of_table.append((token[:, None] + head[:, None]).view(-1))
        padding = (low[lo:hi] + column > high[lo:hi]) & (column < width - num_extra)
        masks.append(padding[:, None].expand(-1, heads, -1).reshape(-1))

    key_row, value_row = torch.cat(rows[0]), torch.cat(rows[-1])
    score, weight = torch.empty(2, key_row.numel(), dtype=torch.float32)
    row_widths = [w for w, size in zip(widths, sizes, strict=True) for _ in range(size * heads)]
    row_start = torch.tensor([0, *accumulate(row_widths)])
    shapes = tuple(
        (_num_rows((blocks, *cache.shape[1:3]), step), cache.shape[3])
        for cache, step in ((key_cache, key_steps), (value_cache, value_steps))
    )
    entries = [size * heads * width for size, width in zip(sizes, widths, strict=True)]
    parts = (
        [part.view(-1, width) for part, width in zip(whole.split(entries), widths, strict=True)]
        for whole in (score, weight)
    )
    _silence_sparse()
    return KeyLists(
        order=None if served == list(range(len(count))) else torch.tensor(served),
        scores=torch.sparse_csr_tensor(
            row_start, key_row, score, (len(row_widths), shapes[0][0]), check_invariants=False
        ),
        score=score,
        mask=torch.zeros_like(score).masked_fill_(torch.cat(masks), float("-inf")),
        weight=weight,
        value_row=value_row,
        row_start=row_start,
        rectangles=tuple(zip(*parts, strict=True)),
        extra=tuple(row_start[1:] - num_extra + e for e in range(num_extra)),
        tables=shapes,
        used=used,
    )


def attend_lists(
    lists: KeyLists,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    softmax: Softmax,
    own: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Attention of one query a sequence over its list: [served, heads, value_dim] fp32.

    query  [served, heads, dim] in the order of the lists
    own    key and value [served, kv_heads, dim | value_dim] that each query sees besides its list

    The lists have an extra column for `own` and, behind it, one for `sinks`, where these are given.
    """
    served, heads, dim = query.shape
    query = query.float()
    keys = _view_heads(key_cache, lists.tables[0], lists.used, "key")
    values = _view_heads(value_cache, lists.tables[1], lists.used, "value")
    score, weight = lists.score, lists.weight
    scale, softcap, sinks = softmax
    if softcap is None:
        score.copy_(lists.mask)
    else:
        score.zero_()
        scale = scale / softcap
    rows = query.reshape(-1, dim)
    torch.sparse.sampled_addmm(lists.scores, rows, keys.t(), alpha=scale, out=lists.scores)
    if own is not None:
        # [served, kv_heads, 1, dim], beside queries [served, kv_heads, group, dim]
        own_key, own_value = (tensor.float().unsqueeze(2) for tensor in own)
        grouped = query.view(served, own_key.shape[1], -1, dim)
        score.index_copy_(0, lists.extra[0], (grouped * own_key).sum(-1).mul_(scale).view(-1))
    if softcap is not None:
        score.tanh_().mul_(softcap).add_(lists.mask)
    if sinks is not None:
        score.index_copy_(0, lists.extra[-1], sinks.float().repeat(served))
    for scored, weighed in lists.rectangles:
        torch.softmax(scored, -1, out=weighed)
    own_weight = None if own is None else weight.index_select(0, lists.extra[0])
    for column in lists.extra:
        weight.index_fill_(0, column, 0.0)
    bags = torch.embedding_bag(
        values, lists.value_row, lists.row_start, False, 0, False, weight, True
    )[0].view(served, heads, -1)
    if own_weight is not None:
        grouped = bags.view(served, own_value.shape[1], -1, bags.shape[2])
        grouped.addcmul_(own_weight.view(*grouped.shape[:3], 1), own_value)
    return bags


def _is_readable_in_place(key_cache: torch.Tensor, value_cache: torch.Tensor, longest: int) -> bool:
    """Whether the pages can be the tables: both fp32, their strides whole heads.

    torch drops the entries of a sparse tensor beyond its number of elements, which padding could
    reach where one sequence fills a cache of one head.
    """
    caches = key_cache, value_cache
    return (
        all(cache.dtype is torch.float32 for cache in caches)
        and not any(step % cache.shape[3] for cache in caches for step in cache.stride()[:3])
        and longest <= _num_rows(key_cache.shape[:3], _head_steps(key_cache))
    )


def _head_steps(cache: torch.Tensor) -> tuple[int, ...]:
    """Heads [dim] from one block, token and head of a cache to the next."""
    return tuple(step // cache.shape[3] for step in cache.stride()[:3])


def _num_rows(shape: Sequence[int], steps: Sequence[int]) -> int:
    """Rows of the table of heads that holds these blocks, tokens and heads."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))


def _view_heads(
    cache: torch.Tensor, shape: tuple[int, int], used: torch.Tensor | None, name: str
) -> torch.Tensor:
    """A cache, or the blocks of it in use, as a table of heads; dead slots hold anything."""
    if used is None:
        return cache.as_strided(shape, (shape[1], 1))
    table = _scratch.take(name, shape[0] * shape[1]).view(used.numel(), *cache.shape[1:])
    # a few blocks at a time, so that what is cast stays in a core's own cache
    step = max(1, _CAST_AT_ONCE // cache[0].numel())
    for part, blocks in zip(table.split(step), used.split(step), strict=True):
        part.copy_(cache.index_select(0, blocks))
    return table.view(shape)


class _Scratch(threading.local):
    """This thread's fp32 copies of one layer, kept since new memory costs more than the copy."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def take(self, name: str, size: int) -> torch.Tensor:
        """Memory of `size` elements; what was taken before under this name may be overwritten."""
        if name not in self._kept or self._kept[name].numel() < size:
            # what is made in inference mode cannot be written outside of it
            with torch.inference_mode(False):
                self._kept[name] = torch.empty(size, dtype=torch.float32)
        return self._kept[name][:size]


_scratch = _Scratch()


def _cut_rectangles(
    served: list[int], count: Sequence[int], heads: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """The sequences as rows have them, and the [start, end) of each rectangle among them."""
    ordered = sorted(served, key=lambda i: -count[i])
    cuts = [0]
    for at, i in enumerate(ordered):
        width = count[ordered[cuts[-1]]]
        saved = heads * (len(ordered) - at) * (width - count[i])
        if saved > _WORTHWHILE and count[i] <= _SHORTER * width:
            cuts.append(at)
    if len(cuts) == 1:
        return served, [(0, len(served))]
    return ordered, list(pairwise([*cuts, len(ordered)]))


@cache
def _silence_sparse() -> None:
    """Spend torch's one warning that sparse tensors are in beta."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(
            torch.tensor([0, 0]), torch.tensor([], dtype=torch.int64), torch.tensor([]), (1, 1)
        )
