"""Refuse tensors that an operation cannot take, by name, before anything is launched.

It knows dtypes, shapes, strides and devices; it knows neither what an operation does with a tensor
nor where it runs. A check costs about a microsecond a tensor and reads none of its values.
"""

from collections.abc import Sequence

import torch

INDEX_DTYPES = (torch.int32, torch.int64)
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# what kernels count in 32 bits, less some tiles that they look ahead
MAX_COUNT = 2**31 - 2**12


def expect(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    *,
    device: torch.device,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    contiguous: bool = False,
) -> None:
    """Raise ValueError unless `tensor` has this shape, dtype and device and a dense last axis.

    A shape may hold None for any extent; dtype None is any, a tuple is one of several. If
    `contiguous`, all axes are dense.
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
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")


def expect_rank(name: str, tensor: torch.Tensor, rank: int, axes: str) -> None:
    """Raise ValueError unless `tensor` has `rank` axes; `axes` is how the error writes them."""
    if tensor.dim() != rank:
        raise ValueError(f"{name}: expected shape {axes}, got {list(tensor.shape)}")


def expect_count(name: str, what: str, count: int, least: int = 1, most: int = MAX_COUNT) -> None:
    """Raise ValueError unless `least` <= `count` <= `most`; `what` says what of `name` it counts.

    The default bound is that of a kernel that counts in 32 bits.
    """
    if not least <= count <= most:
        raise ValueError(f"{name}: expected {least} to {most} {what}, got {count}")


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
    expect("key", key, key.shape, device=device, dtype=FLOAT_DTYPES)
    expect("value", value, (tokens, heads, value_dim), device=device, dtype=key.dtype)
    if not dtype.is_floating_point:
        raise ValueError(f"key_cache: expected a floating dtype, got {dtype}")
    expect("key_cache", key_cache, (blocks, page_size, heads, dim), device=device)
    expect(
        "value_cache",
        value_cache,
        (blocks, page_size, heads, value_dim),
        device=device,
        dtype=dtype,
    )
    expect("slot", slot, (tokens,), device=device, dtype=torch.int64)
    expect_count("value_cache", "slots a block (page_size)", page_size)
    expect_count("key", "kv_heads", heads)
    expect_count("key", "tokens times kv_heads", tokens * heads, least=0)
    expect_count("key", "elements a head", dim)
    expect_count("value_cache", "elements a head", value_dim)


def check_page_tables(
    tables: Sequence[torch.Tensor],
    edit: torch.Tensor,
    edit_start: torch.Tensor,
    edit_page: torch.Tensor,
    row: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    page_size: int,
    num_pages: int | None,
) -> None:
    """What `page_tables` takes."""
    expect_rank("row", row, 1, "[sequences]")
    device, sequences, int32 = row.device, row.shape[0], torch.int32
    for g, table in enumerate(tables):
        expect(f"tables[{g}]", table, (None, None), device=device, dtype=int32, contiguous=True)
        if table.shape[1] < 1:
            raise ValueError(f"tables[{g}]: expected at least one column, got {list(table.shape)}")
    entries = len(tables) * sequences
    expect("edit", edit, (None,), device=device, dtype=int32)
    expect("edit_start", edit_start, (entries + 1,), device=device, dtype=int32)
    expect("edit_page", edit_page, (entries,), device=device, dtype=int32)
    expect("row", row, (sequences,), device=device, dtype=INDEX_DTYPES)
    expect("query_start", query_start, (sequences + 1,), device=device, dtype=int32)
    expect("context_len", context_len, (sequences,), device=device, dtype=int32)
    if page_size < 1:
        raise ValueError(f"page_size: expected at least 1, got {page_size}")
    if num_pages is not None and num_pages < 1:
        raise ValueError(f"num_pages: expected None or at least 1, got {num_pages}")


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
