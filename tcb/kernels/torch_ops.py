"""The operations of this package in torch: what CPU users run, and what each kernel means.

Names, tensors and results are those of the Triton launchers, which check the tensors: these do not.
It knows neither devices nor models.
"""

from dataclasses import dataclass

import torch

from tcb.kernels.step_memo import StepMemo
from tcb.kernels.torch_attention import paged_attention, paged_decode
from tcb.kernels.torch_pages import Steps, token_steps, token_table

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
    table: torch.Tensor,
    edit: torch.Tensor,
    row: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    page_size: int,
    *,
    num_columns: int | None = None,
    slot: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the edits into `table`; return every new token's slot and the batch's block table."""
    edit = edit[edit[:, 0] >= 0].long()
    table[edit[:, 0], edit[:, 1]] = edit[:, 2].int()

    # [sequences, columns]: what each sequence sees; a padding row holds no block
    seen = table[row.clamp(min=0)].masked_fill_((row < 0)[:, None], -1)
    chunk = query_start.diff()
    sequence = torch.repeat_interleave(chunk)
    position = torch.arange(sequence.shape[0]) + (context_len - query_start[:-1])[sequence]
    block = seen[sequence, position // page_size % table.shape[1]].long()
    slots = torch.where(block < 0, -1, block * page_size + position % page_size)

    if slot is None:
        slot = slots
    else:
        slot[: slots.shape[0]] = slots
        slot[slots.shape[0] :] = -1
    if block_table is None:
        block_table = seen[:, :num_columns]
    else:
        block_table.copy_(seen[:, : block_table.shape[1]])
    return slot, block_table


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


def _find_place(slot: torch.Tensor, page_size: int, steps: tuple[Steps | None, ...]) -> _Place:
    live = None
    if slot.numel() and int(slot.min()) < 0:
        live = (slot >= 0).nonzero().view(-1)
        slot = slot[live]
    block, within = slot // page_size, slot % page_size
    rows = tuple(None if step is None else block * step.block + within for step in steps)
    return _Place(live, block, within, rows)
