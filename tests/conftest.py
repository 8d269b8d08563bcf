"""Load Triton and every kernel for the interpreter, where no accelerator is there to run them.

Whether a kernel is interpreted is settled where `triton.jit` decorates it, and for Triton's own
library that is its first import, which transformers causes. TRITON_INTERPRET is set for these
imports alone: but for the tests of the kernels, which set it again, CPU tensors meet torch
operations. A TRITON_INTERPRET that is set from outside is left as it is.
"""

import os
import pkgutil
from importlib import import_module

import pytest
import torch

import tcb.kernels

INTERPRETED = "TRITON_INTERPRET" not in os.environ and not torch.accelerator.is_available()

if INTERPRETED:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for module in pkgutil.walk_packages(tcb.kernels.__path__, "tcb.kernels."):
            import_module(module.name)
