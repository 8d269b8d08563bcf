"""Sort a packed batch's sequences into how torch operations attend them, from integers alone.

single    one new token behind a context: attends a list of keys (`key_lists`)
together  several chunks of similar length without context: one padded batch
alone     any other chunk, by itself, behind the context that it sees
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

# a batch takes chunks at least this long, relative to its longest
_SIMILAR = 0.8


class Single(NamedTuple):
    """A sequence of one new token; besides itself it sees `num_seen` positions from `first` on."""

    sequence: int
    token: int
    first: int
    num_seen: int


class Together(NamedTuple):
    """Chunks without context, each padded to the longest by repeating its last token.

    shape  chunks, width     token  their flat tokens; a slice where these are dense and unpadded
    kept   places in `token` that are no padding, and their tokens; None: all
    """

    shape: tuple[int, int]
    token: torch.Tensor | slice
    kept: tuple[torch.Tensor, torch.Tensor] | None


class Alone(NamedTuple):
    """The tokens [start, end) behind `num_seen` positions of the cache.

    These are in the blocks `pages` [pages], from the place `skip` of the first one on.
    """

    start: int
    end: int
    num_seen: int
    pages: torch.Tensor
    skip: int


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
        num_seen = context if window is None else min(context, window - 1)
        first = context - num_seen
        if end - start == 1 and num_seen:
            single.append(Single(i, start, first, num_seen))
        elif end > start and not num_seen and (window is None or end - start <= window):
            fresh.append((start, end))
        elif end > start:
            page = torch.arange(first // page_size, -(-context // page_size))
            pages = block_table[i, page % block_table.shape[1]].long()
            alone.append(Alone(start, end, num_seen, pages, first % page_size))
    return single, [_put_together(group) for group in _group_similar(fresh)], alone


def _group_similar(chunks: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Chunks (start, end) of similar length, longest first."""
    groups: list[list[tuple[int, int]]] = []
    for start, end in sorted(chunks, key=lambda chunk: (chunk[0] - chunk[1], chunk[0])):
        if not groups or end - start < _SIMILAR * (groups[-1][0][1] - groups[-1][0][0]):
            groups.append([])
        groups[-1].append((start, end))
    return groups


def _put_together(group: list[tuple[int, int]]) -> Together:
    begin, end = group[0]
    shape = len(group), end - begin
    if group == [(begin + i * shape[1], end + i * shape[1]) for i in range(shape[0])]:
        return Together(shape, slice(begin, group[-1][1]), None)
    starts, ends = torch.tensor(group).split(1, dim=1)
    token = starts + torch.arange(shape[1])
    place = (token < ends).view(-1).nonzero().view(-1)
    token = token.minimum(ends - 1).view(-1)
    return Together(shape, token, (place, token[place]))
