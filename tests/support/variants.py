"""What Triton would compile a launch by: a kernel's constants and the kinds of its arguments."""

from contextlib import ExitStack, contextmanager
from importlib import import_module
from unittest.mock import patch

import torch

LAUNCHERS = ("paged_attention", "paged_decode", "kv_write", "page_tables", "page_copy", "sampling")


def variant(launch):
    """A key that two launches share if one compiled kernel serves both."""
    kernel, marks = launch.kernel, launch.kernel.kwargs
    plain = set(marks["do_not_specialize"] or ())
    unaligned = set(marks["do_not_specialize_on_alignment"] or ())
    kinds = tuple(
        _kind(value, name in plain, name in unaligned)
        for name, value in zip(kernel.arg_names, launch.arguments, strict=False)
    )
    return kernel.__name__, kinds, tuple(sorted(launch.constants.items()))


def _kind(value, is_plain, is_unaligned):
    if isinstance(value, tuple):
        # marks do not reach into records
        return tuple(_kind(part, False, False) for part in value)
    if isinstance(value, torch.Tensor):
        return value.dtype, is_unaligned or is_plain or value.data_ptr() % 16 == 0
    if isinstance(value, int):
        width = "i32" if -(2**31) <= value < 2**31 else "i64"
        if is_plain:
            return width
        return "one" if value == 1 else (width, is_unaligned or value % 16 == 0)
    return type(value)


# where a kernel writes what the engine goes on with: place of the argument
_RESULTS = {
    "paged_attention_kernel": (5,),
    "paged_decode_kernel": (3,),
    "merge_parts_kernel": (0,),
    "sample_kernel": (8, 9),
}


@contextmanager
def recorded():
    """The variants of all launches within, as a set that grows. None is started: attention and
    samples are zeros, which the engine goes on with as with any others.
    """
    seen = set()

    def start(launches, _):
        for launch in launches:
            seen.add(variant(launch))
            for place in _RESULTS.get(launch.kernel.__name__, ()):
                result = launch.arguments[place]
                getattr(result, "ptr", result).zero_()

    with ExitStack() as stack:
        for name in LAUNCHERS:
            stack.enter_context(
                patch.object(import_module(f"tcb.kernels.gpu.{name}"), "start", start)
            )
        yield seen
