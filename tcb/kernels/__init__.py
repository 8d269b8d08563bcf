"""The operations on paged keys and values, as Triton kernels and as torch operations.

Nothing is loaded before it is asked for, and where Triton is not installed the torch form of an
operation stands in for it. Knows no models and no sequences.
"""

from importlib import import_module
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
_CPU_HOME = {"sample": "sampling"}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = import_module(f"{__name__}.gpu.{_HOME[name]}")
    except ModuleNotFoundError as missing:
        if missing.name != "triton":
            raise
        home = import_module(f"{__name__}.cpu.{_CPU_HOME.get(name, 'operations')}")
    operation = getattr(home, name)
    globals()[name] = operation
    return operation


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
