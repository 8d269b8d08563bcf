"""Say whether a call runs as a Triton kernel or as torch operations.

It knows devices and Triton's interpreter switch, and nothing of the operations themselves. Triton
is loaded only where a CPU tensor meets a set `TRITON_INTERPRET`.
"""

import os

import torch


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
