"""Hold what a kernel touches to the tensors that it was given, and fill new memory with poison.

It knows Triton's interpreter and torch's allocator, and nothing of the kernels.
"""

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch


@contextmanager
def poisoned_memory():
    """New tensors that nobody fills hold NaN, or the largest integer of their dtype."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # torch fills new memory where it is asked to be deterministic
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


@contextmanager
def fenced():
    """Every element that an interpreted kernel loads or stores lies within one of its tensors.

    From the first to the last element of a tensor, not its whole storage: what stands around a
    slice is out of bounds. A step across raises IndexError, which the interpreter wraps.
    """
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, call = builder.create_masked_load, builder.create_masked_store, executor.__call__
    extents: list[np.ndarray] = []

    def fenced_load(self, pointer, mask, *rest):
        check(extents[-1], pointer, mask, "loaded")
        return load(self, pointer, mask, *rest)

    def fenced_store(self, pointer, value, mask, *rest):
        check(extents[-1], pointer, mask, "stored")
        return store(self, pointer, value, mask, *rest)

    def fenced_call(self, *arguments, **named):
        extents.append(merge([*arguments, *named.values()]))
        try:
            return call(self, *arguments, **named)
        finally:
            extents.pop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_masked_load", fenced_load)
        patch.setattr(builder, "create_masked_store", fenced_store)
        patch.setattr(executor, "__call__", fenced_call)
        yield


@contextmanager
def recorded(*, run: bool = True):
    """The interpreted launches of a block, in order: calls that launch again what was launched.

    As a captured graph does, each keeps its tensors and has its numbers for good. Without `run`
    they are kept and not made.
    """
    from triton.runtime.interpreter import GridExecutor

    launches: list[Callable] = []
    call = GridExecutor.__call__

    def keep(self, *arguments, **named):
        launches.append(partial(call, self, *arguments, **named))
        if run:
            call(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", keep)
        yield launches


def run_last(launch: Callable, programs: int) -> None:
    """Run the last few programs of a recorded launch, which may have any number."""
    from triton.runtime.interpreter import InterpreterBuilder

    executor = launch.args[0]
    (total,) = executor.grid
    set_index, set_size = InterpreterBuilder.set_grid_idx, InterpreterBuilder.set_grid_dim

    def shifted(self, x, y, z):
        set_index(self, x + total - programs, y, z)

    def whole(self, x, y, z):
        set_size(self, total, y, z)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "grid", (programs,))
        patch.setattr(InterpreterBuilder, "set_grid_idx", shifted)
        patch.setattr(InterpreterBuilder, "set_grid_dim", whole)
        launch()


def merge(arguments) -> np.ndarray:
    """[2, extents] first and one past the last byte of tensors, sorted, where they meet as one."""
    merged = []
    for first, end in sorted(extent(tensor) for tensor in tensors(arguments) if tensor.numel()):
        if merged and first <= merged[-1][1]:
            merged[-1][1] = max(end, merged[-1][1])
        else:
            merged.append([first, end])
    return np.array(merged, dtype=np.uint64).reshape(-1, 2).T


def tensors(arguments):
    """The tensors among the arguments of a launch, those in tuples and descriptors too."""
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from tensors(argument)
        elif isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(getattr(argument, "base", None), torch.Tensor):
            yield argument.base


def extent(tensor) -> tuple[int, int]:
    """The first byte of a tensor and the one past its last."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    reach = 1 + sum((size - 1) * step for size, step in sizes)
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()


def check(extents, pointer, mask, what) -> None:
    """Raise IndexError unless every live address is that of an element within the extents."""
    address = np.asarray(pointer.data, dtype=np.uint64)[np.asarray(mask.data, dtype=bool)]
    if not address.size:
        return
    size = np.uint64(pointer.get_element_ty().primitive_bitwidth // 8 or 1)
    place = np.searchsorted(extents[0], address, side="right") - 1
    inside = (place >= 0) & (address + size <= extents[1][place])
    if not inside.all():
        raise IndexError(f"{int((~inside).sum())} of {address.size} elements {what} out of bounds")
