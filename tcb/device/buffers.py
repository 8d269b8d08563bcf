"""What stays on the device between batches (block tables, last tokens, how rows sample), and the
upload of each batch.

Knows nothing of keys and values or of the model.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tcb.device.sampling import SamplingTensors
from tcb.device.upload import upload
from tcb.kernels import page_tables
from tcb.planning.groups import LayerGroup
from tcb.planning.packing import PackedBatch

# a full group's table starts this wide and doubles: at once as wide as the longest sequence, it
# could be larger than the cache
FIRST_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class BatchTensors:
    """A packed batch on the device.

    token_ids, positions      [tokens] int64
    sample_index, sample_row  [samples] int64
    slot, block_table         a group: [tokens] int64, block * page_size + position % page_size;
                              [sequences, columns] int32
    copies                    source and target blocks of forks, each [copies] int64, or nothing

    Sequences that decode come first, chunks after them:
    decode_end                [decodes] int32: positions that each of them sees
    chunks                    [chunks + 1] int32: where each starts, counted from the first one's
                              first token; [chunks] int32: positions of each that the cache holds
    """

    token_ids: Tensor
    positions: Tensor
    sample_index: Tensor
    sample_row: Tensor
    slot: tuple[Tensor, ...]
    block_table: tuple[Tensor, ...]
    copies: tuple[Tensor, ...]
    decode_end: Tensor
    chunks: tuple[Tensor, Tensor]


class Buffers:
    """Persistent device state of one engine, changed only by `load` and by whoever lands sampled
    tokens in `last_token`.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        columns: Sequence[int],
        page_size: int,
        max_requests: int,
        device: torch.device,
    ):
        self.page_size, self.device = page_size, device
        self.last_token = torch.zeros(max_requests, dtype=torch.int64, device=device)
        self.sampling = SamplingTensors(max_requests, device)
        self._max_columns = tuple(columns)
        first = [
            count if group.window is not None else min(count, FIRST_COLUMNS)
            for group, count in zip(groups, columns, strict=True)
        ]
        self._tables = [
            torch.full((max_requests, count), -1, dtype=torch.int32, device=device)
            for count in first
        ]

    def load(self, packed: PackedBatch, num_decodes: int) -> BatchTensors:
        """Upload one batch, edit the block tables, find its slots; the first `num_decodes`
        sequences, of one token each, are to decode. Writes the tables and the rows that are let in.

        All that a batch brings travels in one transfer, for which the host does not wait.
        """
        sampling = self.sampling.pack(packed.admitted)
        copies = [array("q", blocks) for blocks in zip(*packed.copies, strict=True)]
        pages = -(-packed.max_seq_len // self.page_size)
        self._widen(pages)
        parts = [
            # 64-bit values before all others
            *copies,
            *sampling,
            packed.token_ids,
            packed.positions,
            packed.query_start,
            packed.context_len,
            packed.rows,
            packed.sample_index,
            packed.sample_row,
            packed.new_block,
            packed.new_block_start,
            packed.first_new_page,
        ]
        tensors = upload(parts, self.device)
        first = len(copies) + len(sampling)
        self.sampling.admit(tensors[len(copies) : first])
        ids, positions, start, context, rows, index, sample_row, *new_pages = tensors[first:]
        token_rows = torch.repeat_interleave(rows, start.diff(), output_size=packed.num_tokens)
        token_ids = torch.where(ids < 0, self.last_token[token_rows], ids)
        shape = len(self._tables), packed.num_tokens
        slot = torch.empty(shape, dtype=torch.int64, device=self.device)
        new_block, new_block_start, first_new_page = new_pages
        slot, block_tables = page_tables(
            self._tables,
            new_block,
            new_block_start,
            first_new_page,
            rows,
            start,
            context,
            self.page_size,
            num_pages=pages,
            slot=slot,
        )
        return BatchTensors(
            token_ids=token_ids,
            positions=positions.long(),
            sample_index=index.long(),
            sample_row=sample_row.long(),
            slot=slot.unbind(),
            block_table=block_tables,
            copies=tuple(tensors[: len(copies)]),
            decode_end=context[:num_decodes] + 1,
            chunks=(start[num_decodes:] - num_decodes, context[num_decodes:]),
        )

    def _widen(self, pages: int) -> None:
        for g, (table, most) in enumerate(zip(self._tables, self._max_columns, strict=True)):
            rows, count = table.shape
            if count < min(pages, most):
                # of the kernels, none is compiled for a width that is a power of two
                self._tables[g] = table.new_full((rows, 1 << (pages - 1).bit_length()), -1)
                self._tables[g][:, :count] = table
