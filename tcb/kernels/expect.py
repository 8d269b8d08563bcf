"""Refuse one tensor or number that an operation cannot take, by name.

A check costs about a microsecond a tensor and reads none of its values.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# what kernels count in 32 bits, less some tiles that they look ahead
MAX_COUNT = 2**31 - 2**12


def expect(
    name: str,
    tensor: Tensor,
    shape: Sequence[int | None],
    *,
    device: torch.device,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    contiguous: bool = False,
) -> None:
    """Raise ValueError unless `tensor` has this shape, dtype and device and a dense last axis.

    A shape may hold None for any extent; dtype None is any, a tuple is one of several. If
    `contiguous`, all axes are dense.
    """
    actual = tensor.shape
    if actual != shape and not _fits(actual, shape):
        wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
        raise ValueError(f"{name}: expected shape [{wanted}], got {list(actual)}")
    if dtype is not None and tensor.dtype is not dtype and not _is_one_of(tensor.dtype, dtype):
        raise ValueError(f"{name}: expected dtype {_names(dtype)}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name}: expected device {device}, got {tensor.device}")
    if actual and tensor.stride(-1) != 1 and actual[-1] > 1:
        raise ValueError(
            f"{name}: expected a dense last axis (stride 1), got stride {tensor.stride(-1)}"
        )
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")


def expect_rank(name: str, tensor: Tensor, rank: int, axes: str) -> None:
    """Raise ValueError unless `tensor` has `rank` axes; `axes` is how the error writes them."""
    if tensor.dim() != rank:
        raise ValueError(f"{name}: expected shape {axes}, got {list(tensor.shape)}")


def expect_count(name: str, what: str, count: int, least: int = 1, most: int = MAX_COUNT) -> None:
    """Raise ValueError unless `least` <= `count` <= `most`; `what` says what of `name` it counts.

    The default bound is that of a kernel that counts in 32 bits.
    """
    if not least <= count <= most:
        raise ValueError(f"{name}: expected {least} to {most} {what}, got {count}")


def _fits(actual: Sequence[int], shape: Sequence[int | None]) -> bool:
    return len(actual) == len(shape) and all(
        wanted is None or wanted == found for wanted, found in zip(shape, actual, strict=True)
    )


def _is_one_of(dtype: torch.dtype, accepted: torch.dtype | tuple[torch.dtype, ...]) -> bool:
    return isinstance(accepted, tuple) and dtype in accepted


def _names(dtype: torch.dtype | tuple[torch.dtype, ...]) -> str:
    return " or ".join(map(str, dtype)) if isinstance(dtype, tuple) else str(dtype)
