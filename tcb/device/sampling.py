"""How the rows of an engine sample, as columns on the device."""

from array import array
from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from tcb.planning.request import SamplingParams

_COLUMN_DTYPE = {bool: torch.bool, int: torch.int64, float: torch.float32}
# how a column travels; not every device knows 64-bit floats
_CODE = {torch.bool: "q", torch.int64: "q", torch.float32: "f"}


class SamplingTensors:
    """How every row samples: a column [rows] for each field of `SamplingParams`, all off at first.

    params   the record whose fields these are, every one with a default that is a bool, an int or a
             float; columns are bool, int64 and fp32
    """

    def __init__(self, num_rows: int, device: torch.device, params: type = SamplingParams):
        off = {each.name: getattr(params(), each.name) for each in fields(params)}
        self._columns = {
            name: torch.full((num_rows,), value, dtype=_COLUMN_DTYPE[type(value)], device=device)
            for name, value in off.items()
        }
        # 64-bit values first, as `upload` wants them
        self._order = sorted(self._columns, key=lambda name: type(off[name]) is float)

    def pack(self, admitted: Sequence[tuple[int, SamplingParams]]) -> list[array]:
        """What `admit` needs of the rows that are let in, to travel in the upload of their batch;
        nothing where there are none.
        """
        if not admitted:
            return []
        packed = [array("q", [row for row, _ in admitted])]
        for name in self._order:
            values = [getattr(sampling, name) for _, sampling in admitted]
            packed.append(array(_CODE[self._columns[name].dtype], values))
        return packed

    def admit(self, uploaded: Sequence[Tensor]) -> None:
        """Note how the rows that are let in sample: what `pack` returned, on the device."""
        if uploaded:
            rows, *columns = uploaded
            for name, values in zip(self._order, columns, strict=True):
                self._columns[name][rows] = values.to(self._columns[name].dtype)

    def of(self, rows: Tensor) -> dict[str, Tensor]:
        """The columns of these rows, by the names that `tcb.kernels.sample` gives them."""
        return {name: column[rows] for name, column in self._columns.items()}
