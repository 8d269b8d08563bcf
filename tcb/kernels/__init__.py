"""The operations on paged keys and values, as Triton kernels and as torch operations.

Nothing is loaded before it is asked for: importing this package loads neither torch nor Triton, and
on a CPU an operation needs no Triton. Knows no models and no sequences.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tcb.kernels.operations import copy_blocks as copy_blocks
    from tcb.kernels.operations import gather_blocks as gather_blocks
    from tcb.kernels.operations import list_work as list_work
    from tcb.kernels.operations import page_tables as page_tables
    from tcb.kernels.operations import paged_attention as paged_attention
    from tcb.kernels.operations import paged_decode as paged_decode
    from tcb.kernels.operations import sample as sample
    from tcb.kernels.operations import scatter_blocks as scatter_blocks
    from tcb.kernels.operations import write_kv as write_kv

__all__ = [
    "copy_blocks",
    "gather_blocks",
    "list_work",
    "page_tables",
    "paged_attention",
    "paged_decode",
    "sample",
    "scatter_blocks",
    "write_kv",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    operation = getattr(import_module(f"{__name__}.operations"), name)
    globals()[name] = operation
    return operation


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
