"""How the rows of an engine sample, as columns on the device."""

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from tcb.planning.request import SamplingParams

_COLUMN_DTYPE = {bool: torch.bool, int: torch.int64, float: torch.float32}


class SamplingTensors:
    """How every row samples: a column [rows] for each field of `SamplingParams`, all off at first.

    params   the record whose fields these are, every one with a default that is a bool, an int or a
             float; columns are bool, int64 and fp32
    """

    def __init__(self, num_rows: int, device: torch.device, params: type = SamplingParams):
        self._device = device
        off = {each.name: getattr(params(), each.name) for each in fields(params)}
        self._columns = {
            name: torch.full((num_rows,), value, dtype=_COLUMN_DTYPE[type(value)], device=device)
            for name, value in off.items()
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
