"""What each operation takes: its problem as one record that refuses what does not fit, by name.

A record holds the tensors and options of one call in the order in which the operation lists them;
`checked` raises ValueError that names the field, what is accepted and what was given, and returns
the record.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from tcb.kernels.cpu.sampling import MAX_VOCAB
from tcb.kernels.expect import expect, expect_count, expect_rank

INDEX_DTYPES = (torch.int32, torch.int64)
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# the most parts that a decoding sequence is cut into
MAX_SPLITS = 128
_SAMPLING_DTYPES = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), torch.float32),
    **dict.fromkeys(("top_k", "seed", "position"), torch.int64),
    "do_sample": torch.bool,
}


class AttentionOptions(NamedTuple):
    """How scores become weights, for chunks and for single queries."""

    window: int | None
    softcap: float | None
    sinks: Tensor | None
    scale: float | None

    def check(self, heads: int, device: torch.device) -> None:
        """Raise ValueError unless every option can be served for this many query heads."""
        if self.sinks is not None:
            expect("sinks", self.sinks, (heads,), device=device, dtype=FLOAT_DTYPES)
        check_window(self.window)
        if self.scale is not None and not 0 < self.scale < math.inf:
            raise ValueError(f"scale: expected a positive finite number, got {self.scale}")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(
                f"softcap: expected None or a positive finite number, got {self.softcap}"
            )


class Attention(NamedTuple):
    """A packed batch of chunks, for `paged_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    query_start: Tensor
    context_len: Tensor
    options: AttentionOptions
    out: Tensor | None

    def checked(self) -> Self:
        """Return the problem, or raise ValueError."""
        expect_rank("context_len", self.context_len, 1, "[sequences]")
        sequences = self.context_len.shape[0]
        _check_paged(self, "tokens", "context_len", self.context_len, sequences)
        device, dtype = self.query.device, self.query.dtype
        tokens, _, dim = self.query.shape
        kv_heads, value_dim = self.value_cache.shape[2:]
        expect("key", self.key, (tokens, kv_heads, dim), device=device, dtype=dtype)
        expect("value", self.value, (tokens, kv_heads, value_dim), device=device, dtype=dtype)
        expect("query_start", self.query_start, (sequences + 1,), device=device, dtype=torch.int32)
        return self


class Decode(NamedTuple):
    """One query a sequence, for `paged_decode`."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    seq_len: Tensor
    options: AttentionOptions
    num_splits: int | None
    out: Tensor | None

    def checked(self) -> Self:
        """Return the problem, or raise ValueError."""
        expect_rank("query", self.query, 3, "[sequences, heads, dim]")
        _check_paged(self, "sequences", "seq_len", self.seq_len, self.query.shape[0])
        if self.num_splits is not None and not 1 <= self.num_splits <= MAX_SPLITS:
            raise ValueError(
                f"num_splits: expected None or 1 to {MAX_SPLITS}, got {self.num_splits}"
            )
        return self


class Listing(NamedTuple):
    """The shapes, lengths and options that a work list is made for, for `list_work`."""

    query: Tensor
    value: Tensor
    query_start: Tensor
    context_len: Tensor
    window: int | None
    deterministic: bool

    def checked(self) -> Self:
        """Return the problem, or raise ValueError."""
        expect_rank("query", self.query, 3, "[tokens, heads, dim]")
        expect_rank("context_len", self.context_len, 1, "[sequences]")
        device, dtype, sequences = self.query.device, self.query.dtype, self.context_len.shape[0]
        tokens, heads, _ = self.query.shape
        expect("query", self.query, self.query.shape, device=device, dtype=FLOAT_DTYPES)
        expect("value", self.value, (tokens, None, None), device=device, dtype=dtype)
        check_heads(heads, self.value.shape[1])
        check_window(self.window)
        lengths = {"query_start": sequences + 1, "context_len": sequences}
        for name, count in lengths.items():
            expect(name, getattr(self, name), (count,), device=device, dtype=torch.int32)
        return self


class KVWrite(NamedTuple):
    """New keys and values and their slots, for `write_kv`."""

    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slot: Tensor

    def checked(self) -> Self:
        """Return the problem, or raise ValueError."""
        expect_rank("key", self.key, 3, "[tokens, kv_heads, dim]")
        expect_rank("value_cache", self.value_cache, 4, "[blocks, page_size, kv_heads, value_dim]")
        tokens, heads, dim = self.key.shape
        blocks, page_size, _, value_dim = self.value_cache.shape
        device, dtype = self.key.device, self.key_cache.dtype
        key, value = (tokens, heads, dim), (tokens, heads, value_dim)
        expect("key", self.key, key, device=device, dtype=FLOAT_DTYPES)
        expect("value", self.value, value, device=device, dtype=self.key.dtype)
        if not dtype.is_floating_point:
            raise ValueError(f"key_cache: expected a floating dtype, got {dtype}")
        pages = blocks, page_size, heads
        expect("key_cache", self.key_cache, (*pages, dim), device=device)
        expect("value_cache", self.value_cache, (*pages, value_dim), device=device, dtype=dtype)
        expect("slot", self.slot, (tokens,), device=device, dtype=torch.int64)
        expect_count("value_cache", "slots a block (page_size)", page_size)
        expect_count("key", "kv_heads", heads)
        expect_count("key", "tokens times kv_heads", tokens * heads, least=0)
        expect_count("key", "elements a head", dim)
        expect_count("value_cache", "elements a head", value_dim)
        return self


class TableEdits(NamedTuple):
    """Block tables, what a step writes into them and who reads them, for `page_tables`."""

    tables: Sequence[Tensor]
    new_block: Tensor
    new_block_start: Tensor
    first_new_page: Tensor
    row: Tensor
    query_start: Tensor
    context_len: Tensor
    page_size: int
    num_pages: int | None
    slot: Tensor | None
    block_tables: Sequence[Tensor] | None

    @property
    def widths(self) -> list[int]:
        """Columns of every group's part of `block_tables`."""
        columns = (table.shape[1] for table in self.tables)
        return [min(count, self.num_pages or count) for count in columns]

    def checked(self) -> Self:
        """Return the problem, or raise ValueError."""
        expect_rank("row", self.row, 1, "[sequences]")
        device, sequences, int32 = self.row.device, self.row.shape[0], torch.int32
        for g, table in enumerate(self.tables):
            name = f"tables[{g}]"
            expect(name, table, (None, None), device=device, dtype=int32, contiguous=True)
            if table.shape[1] < 1:
                raise ValueError(f"{name}: expected at least one column, got {list(table.shape)}")
        entries = len(self.tables) * sequences
        lengths = {
            "new_block": None,
            "new_block_start": entries + 1,
            "first_new_page": entries,
            "query_start": sequences + 1,
            "context_len": sequences,
        }
        for name, count in lengths.items():
            expect(name, getattr(self, name), (count,), device=device, dtype=int32)
        expect("row", self.row, (sequences,), device=device, dtype=INDEX_DTYPES)
        if self.page_size < 1:
            raise ValueError(f"page_size: expected at least 1, got {self.page_size}")
        if self.num_pages is not None and self.num_pages < 1:
            raise ValueError(f"num_pages: expected None or at least 1, got {self.num_pages}")
        if self.slot is not None:
            groups = len(self.tables)
            expect("slot", self.slot, (groups, None), device=device, dtype=torch.int64)
        if self.block_tables is not None:
            widths, found = self.widths, len(self.block_tables)
            if found != len(widths):
                raise ValueError(f"block_tables: expected {len(widths)} tensors, got {found}")
            for g, (table, width) in enumerate(zip(self.block_tables, widths, strict=True)):
                name, extents = f"block_tables[{g}]", (sequences, width)
                expect(name, table, extents, device=device, dtype=int32, contiguous=True)
        return self


class Sampling(NamedTuple):
    """Logits and how each row of them is sampled, for `sample`."""

    logits: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor
    do_sample: Tensor

    def checked(self) -> Self:
        """Return the problem, or raise ValueError."""
        expect_rank("logits", self.logits, 2, "[rows, vocab]")
        (rows, vocab), device = self.logits.shape, self.logits.device
        expect("logits", self.logits, (rows, vocab), device=device)
        if not self.logits.is_floating_point():
            raise ValueError(f"logits: expected a floating dtype, got {self.logits.dtype}")
        if not 1 <= vocab <= MAX_VOCAB:
            raise ValueError(f"logits: expected a vocabulary of 1..{MAX_VOCAB}, got {vocab}")
        for name, dtype in _SAMPLING_DTYPES.items():
            expect(name, getattr(self, name), (rows,), device=device, dtype=dtype)
        return self


class BatchShape(NamedTuple):
    """What a work list is made for: all of it the host knows, and none of it a length.

    q_per_kv    query heads that share a key-value head
    small_rows  sequences of at most so many rows are a list of their own, one tile each; 0: none is
    tile_rows   rows of a tile of the others; 0: there are no others
    """

    tokens: int
    sequences: int
    q_per_kv: int
    window: int | None
    small_rows: int
    tile_rows: int


@dataclass(frozen=True, slots=True)
class WorkList:
    """The tiles of a batch in the order in which they are attended to, on the device.

    First the list of small sequences, then, behind its room, that of the tiles of the others.

    shape       what it was made for; None of a list that a torch operator made, which only tensors
                leave: it is worked out again
    small_room  slots of the first
    item        [slots, 2] int32, (sequence, tile); undefined behind a list's count
    count       [2] int32, items of either list
    found       [3, slots] int32, scratch: cost, sequence and tile of every slot
    """

    shape: BatchShape | None
    small_room: int
    item: Tensor
    count: Tensor
    found: Tensor

    def small(self) -> tuple[Tensor, Tensor]:
        """Items and count of the small sequences."""
        return self.item[: self.small_room], self.count[:1]

    def tiles(self) -> tuple[Tensor, Tensor]:
        """Items and count of the tiles of the others."""
        return self.item[self.small_room :], self.count[1:]


def check_moves(cache: Tensor, dense: Tensor | None, dense_name: str, **blocks: Tensor) -> None:
    """What `copy_blocks`, `gather_blocks` and `scatter_blocks` take; `blocks`: lists by name."""
    expect_rank("cache", cache, 2, "[blocks, elements]")
    expect("cache", cache, cache.shape, device=cache.device)
    count = None
    for name, block in blocks.items():
        expect(name, block, (count,), device=cache.device, dtype=torch.int64)
        count = block.shape[0]
    if dense is not None:
        expect(dense_name, dense, (count, cache.shape[1]), device=cache.device, dtype=cache.dtype)


def check_heads(heads: int, kv_heads: int) -> None:
    """Raise ValueError unless the query heads are shared out evenly."""
    expect_count("query", "heads", heads)
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"query: expected a multiple of {kv_heads} (kv_heads) heads, got {heads}")


def check_window(window: int | None) -> None:
    """Raise ValueError unless a query sees at least itself."""
    if window is not None and window < 1:
        raise ValueError(f"window: expected None or at least 1, got {window}")


def _check_paged(
    problem: Attention | Decode, rows: str, name: str, lengths: Tensor, sequences: int
) -> None:
    """Check what chunks and single queries have in common; `name` is that of `lengths`."""
    query, key_cache, value_cache = problem.query, problem.key_cache, problem.value_cache
    block_table, out = problem.block_table, problem.out
    expect_rank("query", query, 3, f"[{rows}, heads, dim]")
    expect_rank("key_cache", key_cache, 4, "[blocks, page_size, kv_heads, dim]")
    tokens, heads, dim = query.shape
    blocks, page_size, kv_heads, _ = key_cache.shape
    device, dtype = query.device, query.dtype
    expect("query", query, query.shape, device=device, dtype=FLOAT_DTYPES)
    expect("key_cache", key_cache, (blocks, page_size, kv_heads, dim), device=device, dtype=dtype)
    expect("value_cache", value_cache, (*key_cache.shape[:3], None), device=device, dtype=dtype)
    expect("block_table", block_table, (sequences, None), device=device, dtype=torch.int32)
    expect(name, lengths, (sequences,), device=device, dtype=torch.int32)
    if out is not None:
        expect("out", out, (tokens, heads, value_cache.shape[3]), device=device, dtype=dtype)
    check_heads(heads, kv_heads)
    problem.options.check(heads, device)
    if page_size < 1:
        raise ValueError(f"key_cache: expected a page size of at least 1, got {page_size}")
    if block_table.shape[1] < 1:
        raise ValueError("block_table: expected at least one column, got 0")
    expect_count("query", "elements a head", dim)
    expect_count("value_cache", "elements a head", value_cache.shape[3])
    expect_count("query", "tokens times heads", tokens * heads, least=0)
    positions = block_table.shape[1] * page_size
    expect_count("block_table", "positions (columns times page_size)", positions)
