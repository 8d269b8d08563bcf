"""The operations on paged keys and values, as Triton kernels and as torch operations.

Nothing is loaded before it is asked for, and where Triton is not installed the torch meaning of an
operation stands in for it. Knows no models and no sequences.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_HOME = {
    "paged_attention": "paged_attention",
    "list_work": "paged_attention",
    "paged_decode": "paged_decode",
    "write_kv": "kv_write",
    "page_tables": "page_tables",
    "copy_blocks": "page_copy",
    "gather_blocks": "page_copy",
    "scatter_blocks": "page_copy",
    "sample": "sampling",
}
_TORCH_HOME = {"sample": "torch_sampling"}

__all__ = sorted(_HOME)


class _Kernels(ModuleType):
    """This package: importing the file of an operation binds the operation, not the file."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOME and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Kernels


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = import_module(f"{__name__}.{_HOME[name]}")
    except ModuleNotFoundError as missing:
        if missing.name != "triton":
            raise
        home = import_module(f"{__name__}.{_TORCH_HOME.get(name, 'torch_ops')}")
    operation = getattr(home, name)
    setattr(sys.modules[__name__], name, operation)
    return operation


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
