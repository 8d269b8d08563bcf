"""What a batch runs in, whatever the caller's thread is set to."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from tcb.device.openmp import calm_workers


@contextmanager
def plain_mode(device: torch.device) -> Iterator[None]:
    """`device` is the current one; no gradients, no inference mode, no autocast. On a CPU idle
    workers do not spin.
    """
    if device.type == "cpu":
        calm_workers()
    module: Any = torch.get_device_module(device) if device.type != "cpu" else None
    with (
        nullcontext() if module is None else module.device(device),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        yield
