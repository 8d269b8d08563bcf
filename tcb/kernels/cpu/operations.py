"""The operations of this package in torch operations: what runs on a CPU.

Names, tensors and results are those of `tcb.kernels`, which checks the tensors before.
"""

from collections.abc import Sequence

import torch

from tcb.kernels.cpu.attention import paged_attention, paged_decode
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


@torch.no_grad()
def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot: torch.Tensor,
) -> None:
    """Store new keys and values in their slots; a negative slot is padding and is skipped."""
    page_size = key_cache.shape[1]

    def build() -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        live = (slot >= 0).nonzero().view(-1)
        at = slot[live]
        return None if len(live) == len(slot) else live, at // page_size, at % page_size

    live, block, within = _memo.recall(page_size, (slot,), build)
    for new, cache in ((key, key_cache), (value, value_cache)):
        new = new if live is None else new.index_select(0, live)
        cache.index_put_((block, within), new.to(cache.dtype))


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
    torch.index_select(cache, 0, block, out=out)


def scatter_blocks(data: torch.Tensor, cache: torch.Tensor, block: torch.Tensor) -> None:
    """cache[block[i]] = data[i]."""
    cache.index_copy_(0, block, data)


def _edit_tables(
    tables: Sequence[torch.Tensor],
    edit: torch.Tensor,
    edit_start: torch.Tensor,
    edit_page: torch.Tensor,
    row: torch.Tensor,
) -> None:
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
