"""The operations of this package in torch: what CPU users run, and what each kernel means.

Names, tensors and results are those of the Triton launchers, which check the tensors: these do not.
It knows neither devices nor models.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tcb.kernels.cpu.attention import paged_attention, paged_decode
from tcb.kernels.cpu.flat_views import Steps, token_steps, token_table
from tcb.kernels.cpu.step_cache import StepMemo

__all__ = [
    "copy_blocks",
    "gather_blocks",
    "page_tables",
    "paged_attention",
    "paged_decode",
    "scatter_blocks",
    "write_kv",
]

_memo = StepMemo()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where new tokens go.

    live           the tokens that have a slot; None: all
    block, within  [live tokens]
    rows           [live tokens] rows of the token table of each cache; None: it has none
    """

    live: torch.Tensor | None
    block: torch.Tensor
    within: torch.Tensor
    rows: tuple[torch.Tensor | None, ...]


@torch.no_grad()
def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot: torch.Tensor,
) -> None:
    """Store new keys and values in their slots; a negative slot is padding and is skipped."""
    caches = (key_cache, value_cache)
    steps = tuple(map(token_steps, caches))
    settings = (key_cache.shape[1], steps)
    place = _memo.recall(settings, (slot,), lambda: _find_place(slot, *settings))
    for new, cache, step, row in zip((key, value), caches, steps, place.rows, strict=True):
        new = new if place.live is None else new.index_select(0, place.live)
        if step is None:
            cache.index_put_((place.block, place.within), new.to(cache.dtype))
        else:
            token_table(cache, step).index_copy_(0, row, new.to(cache.dtype))


def page_tables(
    tables: Sequence[torch.Tensor],
    edit: torch.Tensor,
    edit_start: torch.Tensor,
    edit_page: torch.Tensor,
    row: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    page_size: int,
    *,
    num_pages: int | None = None,
    slot: torch.Tensor | None = None,
    block_tables: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Write the edits into `tables`; return the new tokens' slots and the batch's block tables."""
    if edit.shape[0]:
        _edit_tables(tables, edit, edit_start, edit_page, row)
    rows, is_padding = row.clamp(min=0), (row < 0)[:, None]
    sequence = torch.repeat_interleave(query_start.diff())
    tokens = sequence.shape[0]
    position = torch.arange(tokens) + (context_len - query_start[:-1])[sequence]
    page, within = position // page_size, position % page_size
    if slot is None:
        slot = torch.empty((len(tables), tokens), dtype=torch.int64)
    elif tokens < slot.shape[1]:
        slot[:, tokens:] = -1
    seen = []
    for g, table in enumerate(tables):
        # [sequences, columns]: what each sequence sees; a padding row holds no block
        seen.append(table[rows].masked_fill_(is_padding, -1))
        block = seen[g][sequence, page % table.shape[1]].long()
        slot[g, :tokens] = torch.where(block < 0, -1, block * page_size + within)
        seen[g] = seen[g][:, :num_pages]
    if block_tables is None:
        return slot, tuple(seen)
    for block_table, found in zip(block_tables, seen, strict=True):
        block_table.copy_(found)
    return slot, tuple(block_tables)


def copy_blocks(cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """cache[target[i]] = cache[source[i]]; no block is both read and written by two pairs."""
    pairs = [(s, t) for s, t in zip(source.tolist(), target.tolist(), strict=True) if s != t]
    read, written = {s for s, _ in pairs}, [t for _, t in pairs]
    assert read.isdisjoint(written), f"read and written: blocks {sorted(read & set(written))}"
    assert len(set(written)) == len(written), f"written twice: one of blocks {sorted(written)}"
    for s, t in pairs:
        cache[t].copy_(cache[s])


def gather_blocks(cache: torch.Tensor, block: torch.Tensor, out: torch.Tensor) -> None:
    """out[i] = cache[block[i]]."""
    for i, b in enumerate(block.tolist()):
        out[i].copy_(cache[b])


def scatter_blocks(data: torch.Tensor, cache: torch.Tensor, block: torch.Tensor) -> None:
    """cache[block[i]] = data[i]."""
    for i, b in enumerate(block.tolist()):
        cache[b].copy_(data[i])


def _edit_tables(tables, edit, edit_start, edit_page, row):
    """Write each entry's blocks into its row, one page after the other."""
    # hardly any entry has edits: in lists they are found sooner than by half a dozen torch calls
    rows, pages, starts = row.tolist(), edit_page.tolist(), edit_start.tolist()
    for g, table in enumerate(tables):
        columns, own = table.shape[1], slice(g * len(rows), (g + 1) * len(rows))
        ends = starts[own.start + 1 : own.stop + 1]
        places = [
            row * columns + (page + index) % columns
            for row, page, start, end in zip(rows, pages[own], starts[own], ends, strict=True)
            if start < end
            for index in range(end - start)
        ]
        if places:
            blocks = edit[starts[own.start] : starts[own.stop]]
            table.view(-1).index_copy_(0, torch.tensor(places), blocks)


def _find_place(slot: torch.Tensor, page_size: int, steps: tuple[Steps | None, ...]) -> _Place:
    live = None
    if slot.numel() and int(slot.min()) < 0:
        live = (slot >= 0).nonzero().view(-1)
        slot = slot[live]
    block, within = slot // page_size, slot % page_size
    rows = tuple(None if step is None else block * step.block + within for step in steps)
    return _Place(live, block, within, rows)
