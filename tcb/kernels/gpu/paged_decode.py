"""Attention of one query a sequence over its pages, split over what it sees: checks and launches.

    out[i, h] = sum_j softmax_j(scale * query[i, h] . key[j, h // group]) value[j, h // group]

Knows nothing of layers, caches' owners or who runs when.
"""

import torch

from tcb.kernels.checks import expect, expect_rank
from tcb.kernels.contract import (
    Launch,
    block_width,
    check_attention,
    softmax_factors,
    start,
)
from tcb.kernels.dispatch import use_triton
from tcb.kernels.gpu.tuning import (
    MAX_SPLITS,
    MIN_PART_KEYS,
    choose_splits,
    choose_tile,
    read_device,
)


def paged_decode(
    query,
    key_cache,
    value_cache,
    block_table,
    context_len,
    *,
    window=None,
    softcap=None,
    sinks=None,
    scale=None,
    num_splits=None,
    out=None,
):
    """Attend from the newest position of every sequence, its key and value already in the cache.

    query        [sequences, heads, dim]
    key_cache    [blocks, page_size, kv_heads, dim]      value_cache  [..., value_dim]
    block_table  [sequences, columns] int32; logical page p of a sequence is in column p % columns
    context_len  [sequences] int32, the query's own position included; 0 is padding, its out is 0
    window       the query sees its own and the window - 1 positions before it
    softcap      scores become softcap * tanh(score / softcap)
    sinks        [heads], one more logit a head in the denominator
    scale        dim**-0.5 by default
    num_splits   the most parts that a sequence is cut into; the parts then depend on its own length
                 alone. By default the number of sequences and the device choose it

    Returns out [sequences, heads, value_dim] in the dtype of query. Any strides, last axis dense.
    Raises ValueError on a shape, dtype, device or option that does not fit.
    """
    expect_rank("query", query, 3, "[sequences, heads, dim]")
    sequences, heads, dim = query.shape
    expect("context_len", context_len, (sequences,), device=query.device, dtype=torch.int32)
    check_attention(query, key_cache, value_cache, block_table, context_len, window, sinks, out)
    if num_splits is not None and not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits: expected None or 1 to {MAX_SPLITS}, got {num_splits}")
    factors = softmax_factors(scale, softcap, dim)
    if not use_triton(query):
        from tcb.kernels.cpu import operations as torch_ops

        return torch_ops.paged_decode(
            query,
            key_cache,
            value_cache,
            block_table,
            context_len,
            window=window,
            softcap=softcap,
            sinks=sinks,
            scale=scale,
            num_splits=num_splits,
            out=out,
        )
    if out is None:
        out = query.new_empty(sequences, heads, value_cache.shape[3])
    if sequences:
        device = read_device(query.device.type, query.device.index)
        tensors = query, key_cache, value_cache, block_table, context_len, sinks, out
        options = window, softcap is not None, num_splits, factors
        start(plan_launches(device, *tensors, *options), query)
    return out


def plan_launches(
    device,
    query,
    key_cache,
    value_cache,
    block_table,
    context_len,
    sinks,
    out,
    window,
    has_softcap,
    num_splits,
    factors,
):
    """The parts of all sequences and, where a sequence may have several, their merge."""
    from tcb.kernels.gpu.paged_decode_kernel import merge_parts_kernel, paged_decode_kernel

    sequences, heads, dim = query.shape
    _, page_size, kv_heads, value_dim = value_cache.shape
    group = heads // kv_heads
    size = query.element_size(), max(dim, value_dim), group, device.shared
    tile = choose_tile(device.name, "narrow", *size)
    programs = sequences * kv_heads * -(-group // tile.rows)
    if num_splits is None:
        splits = choose_splits(device.processors, programs, tile.residency)
    else:
        splits = num_splits
    # at one split nothing is written to these
    rows = sequences * heads if splits > 1 else 1
    part_total = query.new_empty(rows, splits, value_dim, dtype=torch.float32)
    part_max, part_sum = query.new_empty(2, rows, splits, dtype=torch.float32)
    window_length = window or 0
    a_sink = query if sinks is None else sinks
    shared = {
        "VALUE_DIM": value_dim,
        "VALUE_BLOCK": block_width(value_dim),
        "BLOCK_N": tile.keys,
        "MAX_SPLITS": splits,
        "MIN_TILES": -(-MIN_PART_KEYS // tile.keys) if num_splits is None else 1,
        "HAS_WINDOW": window is not None,
        "HAS_SINKS": sinks is not None,
    }
    yield Launch(
        paged_decode_kernel,
        programs * splits,
        (
            query,
            key_cache,
            value_cache,
            block_table,
            context_len,
            a_sink,
            out,
            part_total,
            part_max,
            part_sum,
            block_table.shape[1],
            window_length,
            *factors,
            *query.stride()[:2],
            *key_cache.stride()[0:3:2],
            *value_cache.stride()[0:3:2],
            block_table.stride(0),
            *out.stride()[:2],
        ),
        shared
        | {
            "KV_HEADS": kv_heads,
            "GROUP": group,
            "DIM": dim,
            "DIM_BLOCK": block_width(dim),
            "STRIDE_KEY_CACHE_SLOT": key_cache.stride(1),
            "STRIDE_VALUE_CACHE_SLOT": value_cache.stride(1),
            "PAGE_SIZE": page_size,
            "BLOCK_M": tile.rows,
            "HAS_SOFTCAP": has_softcap,
            "UPCAST": device.name == "interpreter" and query.dtype == torch.bfloat16,
        }
        | tile.launch_options(),
    )
    if splits > 1:
        parts = part_total, part_max, part_sum
        yield Launch(
            merge_parts_kernel,
            sequences * heads,
            (context_len, a_sink, out, *parts, window_length, *out.stride()[:2]),
            shared | {"HEADS": heads, "SPLITS_BLOCK": 1 << (splits - 1).bit_length()},
        )
