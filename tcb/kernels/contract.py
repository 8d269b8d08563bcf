"""What the two attention launchers share: checks, factors of the softmax, a launch as a value.

Knows neither kernel. A broken promise is a `ValueError` that names the tensor.
"""

import math
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from tcb.kernels.checks import expect, expect_count, expect_rank

LOG2_E = math.log2(math.e)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Factors(NamedTuple):
    """Scalars of the base-2 softmax of raw products x = q k^T: weights are 2^(score * s).

    s = x without a softcap; with one, s = cap_out * tanh(x * cap_in * ln(2) / 2).
    """

    score: float
    cap_in: float
    cap_out: float


class Launch(NamedTuple):
    """A kernel, its number of programs, its arguments, its constants and launch options."""

    kernel: Any
    programs: int
    arguments: tuple
    constants: dict[str, Any]


def start(launches: Iterable[Launch], tensor: torch.Tensor) -> None:
    """Start launches in order on the device of a tensor."""
    # Triton launches on the current device
    guard = nullcontext() if tensor.is_cpu else torch.accelerator.device_index(tensor.device.index)
    with guard:
        for launch in launches:
            launch.kernel[(launch.programs,)](*launch.arguments, **launch.constants)


def check_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_len: torch.Tensor,
    window: int | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Check what prefill and decode have in common."""
    expect_rank("query", query, 3, "[tokens, heads, dim]")
    expect_rank("key_cache", key_cache, 4, "[blocks, page_size, kv_heads, dim]")
    expect_rank("context_len", context_len, 1, "[sequences]")
    tokens, heads, dim = query.shape
    blocks, page_size, kv_heads, _ = key_cache.shape
    device, dtype = query.device, query.dtype
    sequences = context_len.shape[0]
    expect("query", query, query.shape, device=device, dtype=DTYPES)
    expect("key_cache", key_cache, (blocks, page_size, kv_heads, dim), device=device, dtype=dtype)
    expect("value_cache", value_cache, (*key_cache.shape[:3], None), device=device, dtype=dtype)
    expect("block_table", block_table, (sequences, None), device=device, dtype=torch.int32)
    expect("context_len", context_len, (sequences,), device=device, dtype=torch.int32)
    if sinks is not None:
        expect("sinks", sinks, (heads,), device=device, dtype=DTYPES)
    if out is not None:
        shape = tokens, heads, value_cache.shape[3]
        expect("out", out, shape, device=device, dtype=dtype)
    check_heads(heads, kv_heads)
    check_window(window)
    if page_size < 1:
        raise ValueError(f"key_cache: expected a page size of at least 1, got {page_size}")
    if block_table.shape[1] < 1:
        raise ValueError("block_table: expected at least one column, got 0")
    expect_count("query", "elements a head", dim)
    expect_count("value_cache", "elements a head", value_cache.shape[3])
    expect_count("query", "tokens times heads", tokens * heads, least=0)
    positions = block_table.shape[1] * page_size
    expect_count("block_table", "positions (columns times page_size)", positions)


def check_heads(heads: int, kv_heads: int) -> None:
    """Check that the query heads are shared out evenly."""
    expect_count("query", "heads", heads)
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"query: expected a multiple of {kv_heads} (kv_heads) heads, got {heads}")


def check_window(window: int | None) -> None:
    """Check that a query sees at least itself."""
    if window is not None and window < 1:
        raise ValueError(f"window: expected None or at least 1, got {window}")


def softmax_factors(scale: float | None, softcap: float | None, dim: int) -> Factors:
    """Fold scale (dim**-0.5 by default), softcap and log2(e) into the scalars of the kernels."""
    scale = dim**-0.5 if scale is None else scale
    if not 0 < scale < math.inf:
        raise ValueError(f"scale: expected a positive finite number, got {scale}")
    if softcap is None:
        return Factors(scale * LOG2_E, 0.0, 0.0)
    if not 0 < softcap < math.inf:
        raise ValueError(f"softcap: expected None or a positive finite number, got {softcap}")
    return Factors(1.0, 2.0 * LOG2_E * scale / softcap, softcap * LOG2_E)


def block_width(width: int) -> int:
    """The power of two, at least 16 as matrix units want it, that holds a head of this size."""
    return max(16, 1 << (width - 1).bit_length())


def shared_alignment(*tensors: torch.Tensor) -> int:
    """Elements in 16 bytes, the widest load, if all tensors begin and step on 16 bytes; else 1."""
    size = tensors[0].element_size()
    steps = (step * size for tensor in tensors for step in tensor.stride()[:-1])
    starts = (tensor.data_ptr() for tensor in tensors)
    return 1 if any(number % 16 for number in (*starts, *steps)) else 16 // size
