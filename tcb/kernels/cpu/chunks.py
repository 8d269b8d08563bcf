"""Decide how torch operations attend each chunk of a packed batch, from its integers alone.

    single    one new token that sees context: a list of keys (`torch_lists`)
    together  no context: chunks of similar length in one padded batch
    alone     the rest, in turn: behind its context, or longer than the window

It knows lengths and blocks, and neither queries nor what attention is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# a batch takes chunks at least this long, relative to its longest
_SIMILAR = 0.8


@dataclass(frozen=True, slots=True)
class Single:
    """A sequence of one new token; besides itself it sees `count` positions from `first` on."""

    sequence: int
    token: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Together:
    """Chunks without context as one batch, each padded to the longest by repeating its last token.

    start  first token where the batch is dense and not padded; None: it is not
    token  [chunks * width] its tokens, padding included     real  those of `token` that are none
    """

    num_chunks: int
    width: int
    start: int | None
    token: torch.Tensor
    real: torch.Tensor


@dataclass(frozen=True, slots=True)
class Alone:
    """The tokens [start, end), behind `count` positions they see, which are at `block`, `within`.

    block, within  [count] int64
    """

    start: int
    end: int
    count: int
    block: torch.Tensor
    within: torch.Tensor


def sort_chunks(
    starts: Sequence[int],
    contexts: Sequence[int],
    block_table: torch.Tensor,
    page_size: int,
    window: int | None,
) -> tuple[list[Single], list[Together], list[Alone]]:
    """Put every sequence that has new tokens into one of three lists.

    starts  [sequences + 1] first token of each     contexts  [sequences] positions in the cache
    """
    single, fresh, alone = [], [], []
    for i, context in enumerate(contexts):
        start, end = starts[i], starts[i + 1]
        count = context if window is None else min(context, window - 1)
        first = context - count
        if end - start == 1 and count:
            single.append(Single(i, start, first, count))
        elif not count and (window is None or end - start <= window):
            fresh.append((start, end - start))
        elif end > start:
            position = torch.arange(first, context)
            block = block_table[i, position // page_size % block_table.shape[1]].long()
            alone.append(Alone(start, end, count, block, position % page_size))
    return single, group_fresh(fresh), alone


def group_fresh(fresh: Sequence[tuple[int, int]]) -> list[Together]:
    """Put chunks (first token, length) of similar length together; empty ones are left out."""
    groups: list[list[tuple[int, int]]] = []
    for start, length in sorted(fresh, key=lambda chunk: (-chunk[1], chunk[0])):
        if not length:
            break
        if not groups or length < _SIMILAR * groups[-1][0][1]:
            groups.append([])
        groups[-1].append((start, length))
    return [_put_together(group) for group in groups]


def _put_together(group: list[tuple[int, int]]) -> Together:
    (start, width), (_, shortest) = group[0], group[-1]
    dense = shortest == width and all(at == start + i * width for i, (at, _) in enumerate(group))
    starts, lengths = torch.tensor(group).split(1, dim=1)
    column = torch.arange(width)
    return Together(
        num_chunks=len(group),
        width=width,
        start=start if dense else None,
        token=(starts + torch.minimum(column, lengths - 1)).view(-1),
        real=(column < lengths).view(-1).nonzero().view(-1),
    )
