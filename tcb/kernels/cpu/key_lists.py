"""Attention of single queries, each over its own list of cached keys, in torch operations.

    out[r] = sum_j softmax_j(scale * query[r] . key[list[r, j]]) value[list[r, j]]

A row r is one query head of one sequence. Its list names only keys that the row sees: nothing is
copied, no other request's key is touched, and what a dead slot holds cannot reach a result. Scores
are a product sampled at the lists and results are weighted bags of rows, both in fp32 and over the
pages where they lie. Lists of similar length are padded to one width, with a key that they see and
the score -inf, so that softmax runs over rectangles.

It knows neither who asks nor which layers share their lists.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

import torch

from tcb.kernels.cpu.flat_views import Steps, head_steps, num_head_rows

# a further rectangle pays where it saves this many padded entries, as each takes about 15 ns on one
# core (AMD EPYC, AVX2) and one more softmax 10 microseconds, and its lists are this much shorter
_WORTHWHILE, _SHORTER = 1000, 0.75


@dataclass(frozen=True, slots=True)
class KeyLists:
    """The lists of a batch, with scratch for its scores; entries are stored row by row.

    order       [served] the sequences that see a key, in the order of the rows; None: all of them
    place_of    [sequences] place of each in `order`; None where there is none, or not for each
    scores      [rows, keys] sparse, its values are `score` [entries]
    mask        [entries] 0, or -inf for padding           weight     [entries] what softmax writes
    value_row   [entries] row of the value table           row_start  [rows + 1] first entry of each
    rectangles  pairs of views of `score` and `weight`, [rows of one width, width]
    extra       [rows] entries of each column that stands for no key of the cache
    tables      shapes [rows, dim | value_dim] of the tables of heads of both caches
    place       (block, within), each [tokens], to copy out of the pages; None: read in place
    """

    order: torch.Tensor | None
    place_of: torch.Tensor | None
    scores: torch.Tensor
    score: torch.Tensor
    mask: torch.Tensor
    weight: torch.Tensor
    value_row: torch.Tensor
    row_start: torch.Tensor
    rectangles: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    extra: tuple[torch.Tensor, ...]
    tables: tuple[tuple[int, int], tuple[int, int]]
    place: tuple[torch.Tensor, torch.Tensor] | None


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

    Keys are read in place where the caches allow.
    """
    served = [i for i, n in enumerate(count) if n]
    if not served:
        return None
    served, spans = _cut_rectangles(served, count, heads)
    starts, counts = torch.tensor(first), torch.tensor(count)
    cells, padding, widths = [], [], []
    for lo, hi in spans:
        width = max(count[i] for i in served[lo:hi])
        index, column = torch.tensor(served[lo:hi])[:, None], torch.arange(width + num_extra)
        position = starts[index] + torch.minimum(column, counts[index] - 1)
        page = position // key_cache.shape[1]
        # a sequence longer than its table has blocks reads something, but nothing outside the cache
        block = (
            block_table[index, page % block_table.shape[1]].long().clamp_(0, key_cache.shape[0] - 1)
        )
        cells.append((block, position % key_cache.shape[1]))
        padding.append((column >= counts[index]) & (column < width))
        widths += [width + num_extra] * ((hi - lo) * heads)

    kv_heads, place = key_cache.shape[2], None
    steps = [head_steps(cache) for cache in (key_cache, value_cache)]
    if _fits_in_place(key_cache, value_cache, steps, widths):
        num_rows = [
            num_head_rows(cache, step)
            for cache, step in zip((key_cache, value_cache), steps, strict=True)
        ]
    else:
        place = tuple(
            torch.cat([part.reshape(-1) for part in axis]) for axis in zip(*cells, strict=True)
        )
        steps = [Steps(kv_heads, 0, 1)] * 2
        num_rows = [place[0].shape[0] * kv_heads] * 2
        copied = torch.arange(place[0].shape[0]).split([block.numel() for block, _ in cells])
        cells = [(at.view_as(block), block) for at, (block, _) in zip(copied, cells, strict=True)]
    key_row = _entries(cells, steps[0], kv_heads, heads)
    value_row = key_row if steps[0] == steps[1] else _entries(cells, steps[1], kv_heads, heads)
    mask = torch.cat([part[:, None].expand(-1, heads, -1).reshape(-1) for part in padding])
    row_start = torch.tensor([0, *accumulate(widths)])
    score, weight = torch.empty(2, key_row.shape[0])
    ends = row_start[1:, None]
    order = None if served == list(range(len(count))) else torch.tensor(served)
    return KeyLists(
        order=order,
        place_of=None if order is None or len(served) < len(count) else order.argsort(),
        scores=_sparse(row_start, key_row, score, num_rows[0]),
        score=score,
        mask=torch.zeros_like(score).masked_fill_(mask, float("-inf")),
        weight=weight,
        value_row=value_row,
        row_start=row_start,
        rectangles=_rectangles(score, weight, spans, widths, heads),
        extra=tuple((ends - num_extra + e).view(-1) for e in range(num_extra)),
        tables=((num_rows[0], key_cache.shape[3]), (num_rows[1], value_cache.shape[3])),
        place=place,
    )


def attend_lists(
    lists: KeyLists,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    own: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Attention of one query a sequence over its list: [served, heads, value_dim] fp32.

    query  [served, heads, dim] in the order of the lists     sinks  [heads]
    own    key and value [served, kv_heads, dim | value_dim] that each query sees besides its list

    The lists have an extra column for `own` and, behind it, one for `sinks`, where these are given.
    """
    served, heads, dim = query.shape
    query = query.float()
    keys, values = _tables(lists, key_cache, value_cache)
    score, weight = lists.score, lists.weight
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
    )[0]
    if own is not None:
        group = heads // own_value.shape[1]
        bags.view(served, -1, group, bags.shape[1]).addcmul_(
            own_weight.view(served, -1, group, 1), own_value
        )
    return bags.view(served, heads, -1)


def _fits_in_place(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    steps: Sequence[Steps | None],
    widths: Sequence[int],
) -> bool:
    """Whether the pages can be the tables: both fp32, their strides whole heads.

    torch drops the entries of a sparse tensor beyond its number of elements, which padding could
    reach where one sequence fills a cache of one head.
    """
    return (
        key_cache.dtype == value_cache.dtype == torch.float32
        and None not in steps
        and max(widths) <= num_head_rows(key_cache, steps[0])
    )


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


def _entries(
    cells: list[tuple[torch.Tensor, torch.Tensor]], steps: Steps, kv_heads: int, heads: int
) -> torch.Tensor:
    """Table rows of all entries; cells: (block, within) [sequences, width] of each rectangle."""
    head = (torch.arange(kv_heads) * steps.head).repeat_interleave(heads // kv_heads)[None, :, None]
    rows = (block * steps.block + within * steps.token for block, within in cells)
    return torch.cat([(row[:, None] + head).view(-1) for row in rows])


def _rectangles(
    score: torch.Tensor,
    weight: torch.Tensor,
    spans: list[tuple[int, int]],
    widths: list[int],
    heads: int,
) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    rectangles, at = [], 0
    for lo, hi in spans:
        shape = ((hi - lo) * heads, widths[lo * heads])
        end = at + shape[0] * shape[1]
        rectangles.append((score[at:end].view(shape), weight[at:end].view(shape)))
        at = end
    return tuple(rectangles)


def _sparse(
    row_start: torch.Tensor, key_row: torch.Tensor, score: torch.Tensor, num_keys: int
) -> torch.Tensor:
    _silence_sparse()
    return torch.sparse_csr_tensor(
        row_start, key_row, score, (row_start.shape[0] - 1, num_keys), check_invariants=False
    )


@cache
def _silence_sparse() -> None:
    """Spend torch's one warning that sparse tensors are in beta."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(
            torch.tensor([0, 0]), torch.tensor([], dtype=torch.int64), torch.tensor([]), (1, 1)
        )


def _tables(
    lists: KeyLists, key_cache: torch.Tensor, value_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if lists.place is None:
        caches = zip((key_cache, value_cache), lists.tables, strict=True)
        return tuple(cache.as_strided(shape, (shape[1], 1)) for cache, shape in caches)
    return tuple(cache[lists.place].float().flatten(0, 1) for cache in (key_cache, value_cache))
