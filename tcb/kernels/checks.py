"""Refuse tensors that an operation cannot take, by name, before anything is launched.

It knows dtypes, shapes, strides and devices; it knows neither what an operation does with a tensor
nor where it runs. A check costs about a microsecond a tensor and reads none of its values.
"""

from collections.abc import Sequence

import torch

INDEX_DTYPES = (torch.int32, torch.int64)


def expect(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    *,
    device: torch.device,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
) -> None:
    """Raise ValueError unless `tensor` has this shape, dtype and device and a dense last axis.

    A shape may hold None for any extent; dtype None is any, a tuple is one of several.
    """
    actual = tensor.shape
    if actual != shape and not _fits(actual, shape):
        wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
        raise ValueError(f"{name}: expected shape [{wanted}], got {list(actual)}")
    if dtype is not None and tensor.dtype is not dtype and not _is_one_of(tensor.dtype, dtype):
        raise ValueError(f"{name}: expected dtype {_names(dtype)}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name}: expected device {device}, got {tensor.device}")
    if actual and tensor.stride(-1) != 1 and actual[-1] > 1:
        raise ValueError(
            f"{name}: expected a dense last axis (stride 1), got stride {tensor.stride(-1)}"
        )


def expect_rank(name: str, tensor: torch.Tensor, rank: int, axes: str) -> None:
    """Raise ValueError unless `tensor` has `rank` axes; `axes` is how the error writes them."""
    if tensor.dim() != rank:
        raise ValueError(f"{name}: expected shape {axes}, got {list(tensor.shape)}")


def check_write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot: torch.Tensor,
) -> None:
    """What `write_kv` takes."""
    expect_rank("key", key, 3, "[tokens, kv_heads, dim]")
    expect_rank("value_cache", value_cache, 4, "[blocks, page_size, kv_heads, value_dim]")
    tokens, heads, dim = key.shape
    blocks, page_size, _, value_dim = value_cache.shape
    device, dtype = key.device, key_cache.dtype
    expect("key", key, key.shape, device=device)
    expect("value", value, (tokens, heads, value_dim), device=device, dtype=key.dtype)
    expect("key_cache", key_cache, (blocks, page_size, heads, dim), device=device)
    expect(
        "value_cache",
        value_cache,
        (blocks, page_size, heads, value_dim),
        device=device,
        dtype=dtype,
    )
    expect("slot", slot, (tokens,), device=device, dtype=torch.int64)


def check_page_tables(
    table: torch.Tensor,
    edit: torch.Tensor,
    row: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    page_size: int,
    num_columns: int | None,
) -> None:
    """What `page_tables` takes."""
    expect_rank("table", table, 2, "[rows, columns]")
    expect_rank("row", row, 1, "[sequences]")
    device, sequences = table.device, row.shape[0]
    expect("table", table, table.shape, device=device, dtype=torch.int32)
    expect("edit", edit, (None, 3), device=device, dtype=torch.int32)
    expect("row", row, (sequences,), device=device, dtype=INDEX_DTYPES)
    expect("query_start", query_start, (sequences + 1,), device=device, dtype=torch.int32)
    expect("context_len", context_len, (sequences,), device=device, dtype=torch.int32)
    if page_size < 1:
        raise ValueError(f"page_size: expected at least 1, got {page_size}")
    if num_columns is not None and not 1 <= num_columns <= table.shape[1]:
        raise ValueError(
            f"num_columns: expected 1..{table.shape[1]} (the columns of table), got {num_columns}"
        )


def check_move_blocks(
    cache: torch.Tensor, dense: torch.Tensor | None, dense_name: str, **blocks: torch.Tensor
) -> None:
    """What `copy_blocks`, `gather_blocks` and `scatter_blocks` take; `blocks`: lists by name."""
    expect_rank("cache", cache, 2, "[blocks, elements]")
    expect("cache", cache, cache.shape, device=cache.device)
    count = None
    for name, block in blocks.items():
        expect(name, block, (count,), device=cache.device, dtype=torch.int64)
        count = block.shape[0]
    if dense is not None:
        expect(dense_name, dense, (count, cache.shape[1]), device=cache.device, dtype=cache.dtype)


def _fits(actual: Sequence[int], shape: Sequence[int | None]) -> bool:
    return len(actual) == len(shape) and all(
        wanted is None or wanted == found for wanted, found in zip(shape, actual, strict=True)
    )


def _is_one_of(dtype: torch.dtype, accepted: torch.dtype | tuple[torch.dtype, ...]) -> bool:
    return isinstance(accepted, tuple) and dtype in accepted


def _names(dtype: torch.dtype | tuple[torch.dtype, ...]) -> str:
    return " or ".join(map(str, dtype)) if isinstance(dtype, tuple) else str(dtype)
