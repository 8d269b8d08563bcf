"""Say whether a call runs as a Triton kernel or as torch operations, and whether it is traced.

It knows devices, Triton's interpreter switch and who looks on, and nothing of the operations
themselves. Triton is loaded only where a CPU tensor meets a set `TRITON_INTERPRET`.

A call that somebody looks on is one torch operator, `tcb::<name>`, whose arguments are tensors and
plain numbers: under `torch.compile` and `torch.export`, under any `TorchDispatchMode` (and so under
`make_fx`), and within `with as_operators():`, for whoever records in another way. Any other call
goes straight to its form, at the price of this question.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_forced: ContextVar[bool] = ContextVar("tcb_as_operators", default=False)


def is_traced() -> bool:
    """Whether a call of an operation, made now in this thread, is to be one torch operator."""
    # the number of active dispatch modes has no public name
    return (
        torch.compiler.is_dynamo_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or _forced.get()
    )


@contextmanager
def as_operators() -> Iterator[None]:
    """Within, every operation that this thread calls is one torch operator."""
    token = _forced.set(True)
    try:
        yield
    finally:
        _forced.reset(token)


def use_triton(tensor: torch.Tensor) -> bool:
    """True for a tensor of an accelerator, or of a CPU while Triton's interpreter is on."""
    return not tensor.is_cpu or is_interpreting()


def is_interpreting() -> bool:
    """Whether Triton's own switch, `TRITON_INTERPRET`, is on now; False without Triton."""
    if not os.environ.get("TRITON_INTERPRET"):
        return False
    try:
        from triton import knobs
    except ModuleNotFoundError:
        return False
    return bool(knobs.runtime.interpret)
