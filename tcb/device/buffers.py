"""What stays on the device between batches (block tables, last tokens, how rows sample), and the
upload of each batch.

Knows nothing of keys and values or of the model.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tcb.kernels import page_tables
from tcb.planning.groups import LayerGroup
from tcb.planning.packing import PackedBatch
from tcb.planning.request import SamplingParams

# a full group's table starts this wide and doubles: at once as wide as the longest sequence, it
# could be larger than the cache
FIRST_COLUMNS = 64
_COLUMN_DTYPE = {bool: torch.bool, int: torch.int64, float: torch.float32}


@dataclass(frozen=True, slots=True)
class BatchTensors:
    """A packed batch on the device.

    token_ids, positions      [tokens] int64
    query_start, context_len  [sequences + 1], [sequences] int32
    sample_index, sample_row  [samples] int64
    slot, block_table         a group: [tokens] int64, [sequences, columns] int32
    num_decodes               so many sequences, the first, have one token each
    decode_end                [num_decodes] int32: positions that each of them sees
    chunk_start               [others + 1] int32: query_start of the others, from the first of them
    """

    token_ids: Tensor
    positions: Tensor
    query_start: Tensor
    context_len: Tensor
    sample_index: Tensor
    sample_row: Tensor
    decode_end: Tensor
    chunk_start: Tensor
    slot: tuple[Tensor, ...]
    block_table: tuple[Tensor, ...]
    num_decodes: int


class SamplingTensors:
    """How every row samples: a column [rows] for each field of `SamplingParams`, all off at first.

    params   the record whose fields these are, every one with a default that is a bool, an int or a
             float; columns are bool, int64 and fp32
    """

    def __init__(self, num_rows: int, device: torch.device, params: type = SamplingParams):
        self._device = device
        self._columns = {
            each.name: torch.full(
                (num_rows,), each.default, dtype=_COLUMN_DTYPE[type(each.default)], device=device
            )
            for each in fields(params)
        }

    def admit(self, admitted: Sequence[tuple[int, SamplingParams]]) -> None:
        """Note how the rows that are let in sample; rows that stay greedy cost nothing."""
        if not admitted:
            return
        rows = torch.tensor([row for row, _ in admitted], device=self._device)
        for name, column in self._columns.items():
            values = [getattr(sampling, name) for _, sampling in admitted]
            column[rows] = torch.tensor(values, dtype=column.dtype, device=self._device)

    def of(self, rows: Tensor) -> dict[str, Tensor]:
        """The columns of these rows, by the names that `tcb.kernels.sample` gives them."""
        return {name: column[rows] for name, column in self._columns.items()}


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
        self._windows = tuple(group.window for group in groups)
        self._max_columns = tuple(columns)
        self._tables = [
            torch.full(
                (max_requests, count if group.window is not None else min(count, FIRST_COLUMNS)),
                -1,
                dtype=torch.int32,
                device=device,
            )
            for group, count in zip(groups, columns, strict=True)
        ]

    def load(self, packed: PackedBatch) -> BatchTensors:
        """Upload one batch, edit the block tables, find its slots. Writes the tables and the rows
        that are let in.
        """
        self.sampling.admit(packed.admitted)
        pages = -(-packed.max_seq_len // self.page_size)
        self._widen(pages)
        parts = [
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
        ids, positions, start, context, rows, index, sample_row, *edits = tensors
        token_rows = torch.repeat_interleave(rows, start.diff(), output_size=packed.num_tokens)
        token_ids = torch.where(ids < 0, self.last_token[token_rows], ids)
        shape = len(self._tables), packed.num_tokens
        slot = torch.empty(shape, dtype=torch.int64, device=self.device)
        slot, block_tables = page_tables(
            self._tables, *edits, rows, start, context, self.page_size, num_pages=pages, slot=slot
        )
        return BatchTensors(
            token_ids=token_ids,
            positions=positions.long(),
            query_start=start,
            context_len=context,
            sample_index=index.long(),
            sample_row=sample_row.long(),
            decode_end=context[: packed.num_decodes] + 1,
            chunk_start=start[packed.num_decodes :] - packed.num_decodes,
            slot=slot.unbind(),
            block_table=block_tables,
            num_decodes=packed.num_decodes,
        )

    def _widen(self, pages: int) -> None:
        for g, table in enumerate(self._tables):
            if self._windows[g] is None and pages > table.shape[1]:
                count = min(max(2 * table.shape[1], pages), self._max_columns[g])
                wider = table.new_full((table.shape[0], count), -1)
                wider[:, : table.shape[1]] = table
                self._tables[g] = wider


def upload(parts: Sequence[array], device: torch.device) -> list[Tensor]:
    """Arrays of C ints as int32 tensors on the device, in one transfer; on a CPU without a copy of
    each.
    """
    flat = array("i")
    for part in parts:
        flat.extend(part)
    if not flat:
        return [torch.empty(0, dtype=torch.int32, device=device) for _ in parts]
    tensor = torch.frombuffer(flat, dtype=torch.int32)
    if device.type != "cpu":
        tensor = tensor.pin_memory().to(device, non_blocking=True)
    return list(tensor.split([len(part) for part in parts]))
