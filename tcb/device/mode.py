"""What a batch runs in, whatever the caller's thread is set to."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from tcb.device.openmp import calm_workers


def host_by_default() -> AbstractContextManager[Any]:
    """What names no device is made on the host, whatever default device the thread is set to."""
    # the context costs each torch call a microsecond: only where there is something to undo
    is_host = torch.get_default_device().type == "cpu"
    return nullcontext() if is_host else torch.device("cpu")


@contextmanager
def plain_mode(device: torch.device) -> Iterator[None]:
    """`device` is the current one, what names no device is made on the host; no gradients, no
    inference mode, no autocast. On a CPU idle workers do not spin.
    """
    if device.type == "cpu":
        calm_workers()
    module: Any = torch.get_device_module(device) if device.type != "cpu" else None
    with (
        host_by_default(),
        nullcontext() if module is None else module.device(device),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        yield
