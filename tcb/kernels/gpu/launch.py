"""What every launcher shares: a launch as a value, and tensors as records that kernels take.

A record holds a pointer with the strides that belong to it. Inside a record Triton specialises
every integer and pointer (equal to 1, multiples of 16), so what varies from call to call, or lies
where it happens to lie in a larger upload, is an argument of its own, under the marks
`do_not_specialize` and `do_not_specialize_on_alignment`. Constants of a tensor are records, too.
"""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Launch(NamedTuple):
    """A kernel, its number of programs, its arguments, its constants and launch options."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


class Rows(NamedTuple):
    """Heads of packed tokens, [tokens, heads, width]; ptr is a tensor until a kernel has it."""

    ptr: Any
    stride_token: int
    stride_head: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Rows":
        """The record of a tensor."""
        return cls(tensor, tensor.stride(0), tensor.stride(1))


class Cache(NamedTuple):
    """Keys or values in pages, [blocks, page_size, kv_heads, width]; ptr as that of `Rows`."""

    ptr: Any
    stride_block: int
    stride_slot: int
    stride_head: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Cache":
        """The record of a tensor."""
        return cls(tensor, tensor.stride(0), tensor.stride(1), tensor.stride(2))


class Width(NamedTuple):
    """Constants of keys or of values: elements of a head, and a power of two that holds them.

    stride_slot and stride_token, elements from one slot of a page or one new token to the next, are
    here for kernels that walk tiles of them.
    """

    dim: int
    block: int
    stride_slot: int = 0
    stride_token: int = 0


# Triton's own forms of these two cost microseconds a call on the host
def ceil_div(count: int, size: int) -> int:
    """How many parts of this size hold so many."""
    return -(-count // size)


def power_of_2(count: int) -> int:
    """The least power of two that is no less than a positive count."""
    return 1 << (count - 1).bit_length()


def start(launches: Iterable[Launch], tensor: Tensor) -> None:
    """Start launches in order on the device of a tensor."""
    # Triton launches on the current device
    guard = nullcontext() if tensor.is_cpu else torch.accelerator.device_index(tensor.device.index)
    with guard:
        for launch in launches:
            launch.kernel[(launch.programs,)](*launch.arguments, **launch.constants)
