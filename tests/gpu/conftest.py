"""What the checks on a device share: the device itself, its memory, and what it has no room for.

Every check has full cases behind the `gpu` mark, for an accelerator, and reduced ones, which run
anywhere in Triton's interpreter. `make gpu` runs the full ones and records what each saw.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bench.lib import machine
from tests.kernels.conftest import device, interpreter

__all__ = ["device", "interpreter"]


@pytest.fixture(autouse=True)
def own_memory(request: pytest.FixtureRequest, device: torch.device) -> Iterator[None]:
    """Full cases need an accelerator; each check begins with all memory that can be had."""
    if request.node.get_closest_marker("gpu") and device.type == "cpu":
        pytest.skip("no accelerator: the reduced cases run without one")
    yield
    machine.release_memory(device)


@pytest.fixture
def saw(record_property: Any) -> Any:
    """`saw(error=1e-3)` keeps figures with the result of a check."""

    def keep(**figures: Any) -> None:
        for name, figure in figures.items():
            record_property(name, figure)

    return keep


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Skip a check that finds no room: other processes check on the same device."""
    try:
        return (yield)
    except torch.OutOfMemoryError as error:
        pytest.skip(f"out of memory: {str(error).splitlines()[0][:200]}")
