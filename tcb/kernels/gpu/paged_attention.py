"""Causal attention of packed chunks whose context lies in pages: checks, tile choice and launches.

    out[t, h] = sum_j softmax_j(scale * query[t, h] . key[j, h // group]) value[j, h // group]

over the positions j that token t sees. Knows nothing of layers, caches' owners or who runs when.
"""

import torch

from tcb.kernels.checks import expect, expect_rank
from tcb.kernels.contract import (
    DTYPES,
    Launch,
    block_width,
    check_attention,
    check_heads,
    check_window,
    shared_alignment,
    softmax_factors,
    start,
)
from tcb.kernels.dispatch import use_triton
from tcb.kernels.gpu.tuning import choose_tile, read_device
from tcb.kernels.gpu.work_list import BatchShape, WorkList, reserve
from tcb.kernels.gpu.work_list import plan_launches as plan_list

# programs of the grid for each processor of the device: more than run at once on any of them, so
# that the hardware keeps each as full as it can; they take the tiles in turn, the longest first
_PROGRAMS = 8


def paged_attention(
    query,
    key,
    value,
    key_cache,
    value_cache,
    block_table,
    query_start,
    context_len,
    *,
    window=None,
    softcap=None,
    sinks=None,
    scale=None,
    out=None,
    deterministic=False,
    work_list=None,
):
    """Attend from the new tokens of every sequence to its cached context and themselves, causally.

    query        [tokens, heads, dim]
    key, value   [tokens, kv_heads, dim | value_dim], of the new tokens; not read from the cache
    key_cache    [blocks, page_size, kv_heads, dim]      value_cache  [..., value_dim]
    block_table  [sequences, columns] int32; logical page p of a sequence is in column p % columns
    query_start  [sequences + 1] int32; sequence i owns the tokens query_start[i]:query_start[i + 1]
    context_len  [sequences] int32; its positions that are in the cache, before its new tokens
    window       a query at position i sees the positions j with i - window < j <= i
    softcap      scores become softcap * tanh(score / softcap)
    sinks        [heads], one more logit a head in the denominator
    scale        dim**-0.5 by default
    deterministic  a token's bits depend on its own sequence alone: not on the batch around it, nor
                 on where chunks begin, one of a single token included. One tile shape serves all,
                 that of few rows, so long chunks take several times as long
    work_list    what `list_work` returned for these lengths, shapes and options; it serves all
                 layers that share them. Without one it is made anew; torch operations need none

    Returns out [tokens, heads, value_dim] in the dtype of query. Tokens of no sequence (padding)
    are 0 in a new `out`; in a given one they are left as they are. Any strides, last axis dense.
    Raises ValueError on a shape, dtype, device or option that does not fit, and for `deterministic`
    where torch operations serve a CPU, whose bits nobody promises.
    """
    check_attention(query, key_cache, value_cache, block_table, context_len, window, sinks, out)
    tokens, heads, dim = query.shape
    kv_heads, value_dim = value_cache.shape[2:]
    sequences, device, dtype = context_len.shape[0], query.device, query.dtype
    expect("key", key, (tokens, kv_heads, dim), device=device, dtype=dtype)
    expect("value", value, (tokens, kv_heads, value_dim), device=device, dtype=dtype)
    expect("query_start", query_start, (sequences + 1,), device=device, dtype=torch.int32)
    factors = softmax_factors(scale, softcap, dim)
    if not use_triton(query):
        if deterministic:
            raise ValueError("deterministic: expected False for torch operations, got True")
        from tcb.kernels.cpu import operations as torch_ops

        return torch_ops.paged_attention(
            query,
            key,
            value,
            key_cache,
            value_cache,
            block_table,
            query_start,
            context_len,
            window=window,
            softcap=softcap,
            sinks=sinks,
            scale=scale,
            out=out,
        )
    if out is None:
        out = query.new_zeros(tokens, heads, value_dim)
    if tokens and sequences:
        device_facts = read_device(device.type, device.index)
        tensors = query, key, value, key_cache, value_cache, block_table, query_start, context_len
        options = sinks, out, window, softcap is not None, factors, deterministic
        if work_list is None:
            lengths = query_start, context_len
            work_list = list_work(
                query, value, *lengths, window=window, deterministic=deterministic
            )
        start(plan_launches(device_facts, *tensors, *options, work_list), query)
    return out


def list_work(
    query, value, query_start, context_len, *, window=None, deterministic=False
) -> WorkList | None:
    """List the tiles of a batch on the device, for the `work_list` of `paged_attention`.

    Tensors and options are those of `paged_attention`; of query and value only shapes and dtype
    count, so one list serves all layers of the same heads and the same window. None where torch
    operations attend. Raises ValueError on a tensor or an option that does not fit.
    """
    expect_rank("query", query, 3, "[tokens, heads, dim]")
    expect_rank("context_len", context_len, 1, "[sequences]")
    tokens, device, sequences = query.shape[0], query.device, context_len.shape[0]
    expect("query", query, query.shape, device=device, dtype=DTYPES)
    expect("value", value, (tokens, None, None), device=device, dtype=query.dtype)
    check_heads(query.shape[1], value.shape[1])
    check_window(window)
    expect("query_start", query_start, (sequences + 1,), device=device, dtype=torch.int32)
    expect("context_len", context_len, (sequences,), device=device, dtype=torch.int32)
    if not use_triton(query):
        return None
    facts = read_device(device.type, device.index)
    shape, _, _ = choose_tiles(facts, query, value, context_len, window, deterministic)
    work = reserve(shape, device)
    start(plan_list(work, query_start, context_len), query)
    return work


def plan_launches(
    device,
    query,
    key,
    value,
    key_cache,
    value_cache,
    block_table,
    query_start,
    context_len,
    sinks,
    out,
    window,
    has_softcap,
    factors,
    deterministic=False,
    work_list=None,
):
    """A narrow launch for sequences of few rows and a wide one for the rest, from static shapes.

    Without a work_list their tiles are those of one that nobody fills.
    """
    from tcb.kernels.gpu.paged_attention_kernel import paged_attention_kernel

    dim, (kv_heads, value_dim) = query.shape[2], value_cache.shape[2:]
    shape, narrow, wide = choose_tiles(device, query, value, context_len, window, deterministic)
    work = reserve(shape, query.device) if work_list is None else work_list
    if not isinstance(work, WorkList):
        raise ValueError(f"work_list: expected None or a WorkList, got {type(work).__name__}")
    if work.shape != shape:
        raise ValueError(f"work_list: expected one for {shape}, got one for {work.shape}")
    shares = [(narrow, *work.small())] if shape.small_rows else []
    shares += [(wide, *work.tiles())] if shape.tile_rows else []
    strides = (
        *query.stride()[:2],
        key.stride(1),
        value.stride(1),
        *key_cache.stride()[0:3:2],
        *value_cache.stride()[0:3:2],
        block_table.stride(0),
        *out.stride()[:2],
    )
    constants = {
        "KV_HEADS": kv_heads,
        "GROUP": shape.group,
        "DIM": dim,
        "VALUE_DIM": value_dim,
        "DIM_BLOCK": block_width(dim),
        "VALUE_BLOCK": block_width(value_dim),
        "STRIDE_KEY_CACHE_SLOT": key_cache.stride(1),
        "STRIDE_VALUE_CACHE_SLOT": value_cache.stride(1),
        "STRIDE_KEY_TOKEN": key.stride(0),
        "STRIDE_VALUE_TOKEN": value.stride(0),
        "PAGE_SIZE": key_cache.shape[1],
        "ALIGN": shared_alignment(key, value, key_cache, value_cache),
        "HAS_WINDOW": window is not None,
        "HAS_SOFTCAP": has_softcap,
        "HAS_SINKS": sinks is not None,
        "UPCAST": device.name == "interpreter" and query.dtype == torch.bfloat16,
    }
    for tile, item, count in shares:
        arguments = (
            query,
            key,
            value,
            key_cache,
            value_cache,
            block_table,
            query_start,
            context_len,
            query if sinks is None else sinks,
            out,
            item,
            count,
            block_table.shape[1],
            window or 0,
            *factors,
            *strides,
        )
        blocks = {"BLOCK_M": tile.rows, "BLOCK_N": tile.keys, "ZONES": tile.zones}
        yield Launch(
            paged_attention_kernel,
            min(device.processors * _PROGRAMS, item.shape[0] * kv_heads),
            arguments,
            constants | blocks | tile.launch_options(),
        )


def choose_tiles(device, query, value, context_len, window, deterministic):
    """Return (shape of the work list, narrow tile, tile of the other sequences).

    If deterministic, narrow tiles serve all: a token meets the same code and the same tiles of
    keys wherever its row lies.
    """
    tokens, heads, dim = query.shape
    kv_heads, value_dim = value.shape[1:]
    sequences, group = context_len.shape[0], heads // kv_heads
    size = query.element_size(), max(dim, value_dim), group, device.shared
    narrow = choose_tile(device.name, "narrow", *size)
    wide = narrow if deterministic else choose_tile(device.name, "wide", *size)
    small_rows, tile_rows = narrow.rows, wide.rows
    if deterministic or (sequences == 1 and tokens * group > narrow.rows):
        small_rows = 0
    elif tokens * group <= narrow.rows:
        tile_rows = 0
    return BatchShape(tokens, sequences, group, window, small_rows, tile_rows), narrow, wide
