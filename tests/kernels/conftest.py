"""Run this folder's tests in Triton's interpreter, or on the accelerator if there is one.

With TRITON_INTERPRET=0 and no accelerator the tests of values run on torch operations.
"""

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Switch the interpreter on, where tests/conftest.py made the kernels for it."""
    if "TRITON_INTERPRET" not in os.environ and not torch.accelerator.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def device():
    """Where the tensors of a test live."""
    if os.environ.get("TRITON_INTERPRET") != "1" and torch.accelerator.is_available():
        return torch.accelerator.current_accelerator()
    return torch.device("cpu")
