"""Causal attention of packed chunks whose context lies in pages: checks, tile choice and launches.

    out[t, h] = sum_j softmax_j(scale * query[t, h] . key[j, h // group]) value[j, h // group]

over the positions j that token t sees. Knows nothing of layers, caches' owners or who runs when.
"""

import torch

from tcb.kernels.attention_contract import (
    Launch,
    block_width,
    check_attention,
    shared_alignment,
    softmax_factors,
    start,
)
from tcb.kernels.checks import expect
from tcb.kernels.dispatch import use_triton
from tcb.kernels.tuning import choose_tile, read_device


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

    Returns out [tokens, heads, value_dim] in the dtype of query. Tokens of no sequence (padding)
    are 0 in a new `out`; in a given one they are left as they are. Any strides, last axis dense.
    Raises ValueError on a shape, dtype, device or option that does not fit.
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
        from tcb.kernels import torch_ops

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
        options = sinks, out, window, softcap is not None, factors
        start(plan_launches(device_facts, *tensors, *options), query)
    return out


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
):
    """A narrow launch for sequences of few rows and a wide one for the rest, from static shapes."""
    from tcb.kernels.paged_attention_kernel import paged_attention_kernel

    tokens, heads, dim = query.shape
    kv_heads, value_dim = value_cache.shape[2:]
    sequences, group = context_len.shape[0], heads // kv_heads
    size = query.element_size(), max(dim, value_dim), group
    narrow = choose_tile(device.name, "narrow", *size)
    wide = choose_tile(device.name, "wide", *size)
    # (tile, tiles of the grid, fewest and most rows of the sequences served)
    tiles = tokens * group // wide.rows + sequences
    shares = [(narrow, sequences, 1, narrow.rows), (wide, tiles, narrow.rows + 1, 0)]
    if tokens * group <= narrow.rows:
        shares = shares[:1]
    elif sequences == 1:
        shares = [(wide, tiles, 1, 0)]
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
        "GROUP": group,
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
    for tile, num_tiles, min_rows, max_rows in shares:
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
            sequences,
            num_tiles,
            block_table.shape[1],
            window or 0,
            *factors,
            *strides,
        )
        shape = {
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.keys,
            "MIN_ROWS": min_rows,
            "MAX_ROWS": max_rows,
            "ZONES": tile.zones,
        }
        yield Launch(
            paged_attention_kernel,
            num_tiles * kv_heads,
            arguments,
            constants | shape | tile.launch_options(),
        )
