"""Attention of one query a sequence over its pages, split over what it sees.

    out[i, h] = sum_j softmax_j(scale * query[i, h] . key[j, h // q_per_kv]) value[j, h // q_per_kv]

One program a part, which leaves its sums un-normalised in fp32, with the maximum and the sum of
weights of each row; then one program a head merges the parts.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from tcb.kernels.contract import MAX_SPLITS, Decode
from tcb.kernels.gpu.launch import Cache, Launch, Rows, Width, ceil_div, start
from tcb.kernels.gpu.tile import (
    Factors,
    Pages,
    Softmax,
    Source,
    add_sink,
    attend_tiles,
    block_width,
    divide,
    fold_options,
    load_rows,
    no_keys,
)
from tcb.kernels.gpu.tuning import (
    MIN_PART_KEYS,
    DeviceFacts,
    choose_splits,
    choose_tile,
    read_device,
)

# partial results of a head that its merge looks at together; no power of two that is smaller holds
# the most parts, whose number is no constant: it follows the sequences of a batch
PARTS_BLOCK = tl.constexpr(MAX_SPLITS)


def attend(problem: Decode) -> Tensor:
    """`paged_decode` of a problem that was checked."""
    query, out = problem.query, problem.out
    if out is None:
        out = query.new_empty(*query.shape[:2], problem.value_cache.shape[3])
    if query.shape[0]:
        facts = read_device(query.device.type, query.device.index)
        start(plan_launches(facts, problem._replace(out=out)), query)
    return out


def plan_launches(facts: DeviceFacts, problem: Decode) -> Iterator[Launch]:
    """The parts of all sequences and, where a sequence may have several, their merge.

    The problem has an `out`.
    """
    query, key_cache, value_cache, block_table, seq_len, options, num_splits, out = problem
    assert out is not None, "out: expected a tensor, got None"
    sequences, heads, dim = query.shape
    _, page_size, kv_heads, value_dim = value_cache.shape
    q_per_kv = heads // kv_heads
    size = query.element_size(), max(dim, value_dim), q_per_kv, facts.shared
    tile = choose_tile(facts.name, "narrow", *size)
    programs = sequences * kv_heads * ceil_div(q_per_kv, tile.rows)
    if num_splits is None:
        splits = choose_splits(facts.processors, programs, tile.residency)
        min_tiles = ceil_div(MIN_PART_KEYS, tile.keys)
    else:
        splits, min_tiles = num_splits, 1
    # at one split nothing is written to these; rows come in fours, so that each begins on 16 bytes
    rows = 4 * ceil_div(sequences * heads, 4) if splits > 1 else 4
    part_total = query.new_empty(rows, splits, value_dim, dtype=torch.float32)
    parts = Softmax(part_total, *query.new_empty(2, rows, splits, dtype=torch.float32))
    sinks = query if options.sinks is None else options.sinks
    factors, has = fold_options(options, query, facts)
    window = options.window or 0
    shared = {
        "VALUES": Width(value_dim, block_width(value_dim), value_cache.stride(1)),
        "BLOCK_N": tile.keys,
        "MIN_TILES": min_tiles,
        "HAS": has,
    }
    records = Rows.of(query), Cache.of(key_cache), Cache.of(value_cache), Rows.of(out), parts
    integers = block_table.shape[1], splits, window, factors, block_table.stride(0)
    constants = {
        "KEYS": Width(dim, block_width(dim), key_cache.stride(1)),
        "KV_HEADS": kv_heads,
        "Q_PER_KV": q_per_kv,
        "PAGE_SIZE": page_size,
        "BLOCK_M": tile.rows,
    }
    yield Launch(
        paged_decode_kernel,
        programs * splits,
        (*records, block_table, seq_len, sinks, *integers),
        shared | constants | tile.launch_options(),
    )
    if splits > 1:
        yield Launch(
            merge_parts_kernel,
            sequences * heads,
            (Rows.of(out), parts, seq_len, sinks, splits, window),
            shared | {"HEADS": heads},
        )


@triton.jit
def plan_parts(
    seq_len,
    max_parts,
    window,
    HAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
):
    """Return (first visible key, first tile, end tile, tiles a part, parts) of one sequence.

    What the window leaves, not the whole sequence, is cut into at most max_parts parts of whole
    tiles, MIN_TILES or more; a sequence of nothing has one empty part.
    """
    first_key = tl.maximum(seq_len - window, 0) if HAS.window else 0
    first_tile = first_key // BLOCK_N
    end_tile = tl.cdiv(seq_len, BLOCK_N)
    tiles = end_tile - first_tile
    tiles_per_part = tl.maximum(tl.cdiv(tiles, max_parts), MIN_TILES)
    parts = tl.maximum(tl.cdiv(tiles, tiles_per_part), 1)
    return first_key, first_tile, end_tile, tiles_per_part, parts


# the integers of a batch are parts of larger tensors, so their alignment is that of chance
@triton.jit(
    do_not_specialize=["columns", "max_parts", "window", "stride_table_sequence"],
    do_not_specialize_on_alignment=["block_table_ptr", "seq_len_ptr"],
)
def paged_decode_kernel(
    query: Rows,
    key_cache: Cache,
    value_cache: Cache,
    out: Rows,
    part: Softmax,
    block_table_ptr,
    seq_len_ptr,
    sinks_ptr,
    columns,
    max_parts,
    window,
    factors: Factors,
    stride_table_sequence,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    Q_PER_KV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Attend from BLOCK_M heads of one key-value head to one part of a sequence.

    A grid of sequences * max_parts * KV_HEADS * cdiv(Q_PER_KV, BLOCK_M) programs. The only part of
    a sequence goes straight to out; of several, each goes to fp32 scratch: its total to
    [sequences * heads, max_parts, value_dim], its row_max and row_sum to [.., max_parts].
    """
    HEAD_BLOCKS: tl.constexpr = (Q_PER_KV + BLOCK_M - 1) // BLOCK_M
    program = tl.program_id(0)
    head_block = program % HEAD_BLOCKS
    head = (program // HEAD_BLOCKS % KV_HEADS).to(tl.int64)
    # unsigned: a signed division takes 35 more registers on sm_90
    part_of_all = (program // (HEAD_BLOCKS * KV_HEADS)).to(tl.uint32)
    index = (part_of_all % max_parts.to(tl.uint32)).to(tl.int32)
    sequence = (part_of_all // max_parts.to(tl.uint32)).to(tl.int64)
    seq_len = tl.load(seq_len_ptr + sequence)
    first_key, first_tile, end_tile, tiles_per_part, parts = plan_parts(
        seq_len, max_parts, window, HAS, BLOCK_N, MIN_TILES
    )
    if index >= parts:
        return
    first_tile += index * tiles_per_part
    end_tile = tl.minimum(first_tile + tiles_per_part, end_tile)

    row = head_block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < Q_PER_KV
    query_head = head * Q_PER_KV + row
    query_row = query.ptr + (sequence * query.stride_token + query_head * query.stride_head)
    queries = load_rows(query_row, inside, KEYS, True)
    total, row_max, row_sum = attend_tiles(
        no_keys(BLOCK_M, VALUES.block),
        queries,
        tl.zeros([BLOCK_M], tl.int32) + (seq_len - 1),
        first_tile,
        end_tile,
        first_key,
        seq_len,
        seq_len,
        window,
        factors,
        Source(key_cache.ptr + head * key_cache.stride_head, key_cache.stride_block, 0),
        Source(value_cache.ptr + head * value_cache.stride_head, value_cache.stride_block, 0),
        Pages(block_table_ptr + sequence * stride_table_sequence, columns),
        KEYS,
        VALUES,
        PAGE_SIZE,
        BLOCK_N,
        HAS,
        HAS_CHUNK=False,
        MASKED=True,
    )
    row_max *= factors.score
    column = tl.arange(0, VALUES.block)
    mask = inside[:, None] & (column < VALUES.dim)[None, :]
    if parts == 1:
        if HAS.sinks:
            sink = tl.load(sinks_ptr + query_head, mask=inside, other=0.0).to(tl.float32)
            total, row_sum = add_sink(total, row_max, row_sum, sink * 1.4426950408889634)
        out_row = out.ptr + (sequence * out.stride_token + query_head * out.stride_head)
        result = divide(total, row_sum).to(out.ptr.dtype.element_ty)
        tl.store(out_row[:, None] + column[None, :], result, mask=mask)
    else:
        place = (sequence * (KV_HEADS * Q_PER_KV) + query_head) * max_parts + index
        tl.store(part.total + place[:, None] * VALUES.dim + column[None, :], total, mask=mask)
        tl.store(part.row_max + place, row_max, mask=inside)
        tl.store(part.row_sum + place, row_sum, mask=inside)


@triton.jit(
    do_not_specialize=["max_parts", "window"], do_not_specialize_on_alignment=["seq_len_ptr"]
)
def merge_parts_kernel(
    out: Rows,
    part: Softmax,
    seq_len_ptr,
    sinks_ptr,
    max_parts,
    window,
    HEADS: tl.constexpr,
    VALUES: tl.constexpr,
    HAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
):
    """Merge the parts of one head of one sequence into out, and count its sink, once.

    A grid of sequences * HEADS programs; the sequences of one part are already in out.
    """
    CHUNK: tl.constexpr = 16
    program = tl.program_id(0).to(tl.int64)
    sequence = program // HEADS
    head = program % HEADS
    seq_len = tl.load(seq_len_ptr + sequence)
    _, _, _, _, parts = plan_parts(seq_len, max_parts, window, HAS, BLOCK_N, MIN_TILES)
    if parts == 1:
        return
    first = program * max_parts
    index = tl.arange(0, PARTS_BLOCK)
    part_max = tl.load(part.row_max + first + index, mask=index < parts, other=float("-inf"))
    top = tl.max(part_max, 0)
    if HAS.sinks:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    part_sum = tl.load(part.row_sum + first + index, mask=index < parts, other=0.0)
    row_sum = tl.sum(part_sum * tl.exp2(part_max - top), 0)
    if HAS.sinks:
        row_sum += tl.exp2(sink - top)

    column = tl.arange(0, VALUES.block)
    total = tl.full([VALUES.block], 0.0, tl.float32)
    for first_index in range(0, parts, CHUNK):
        some = first_index + tl.arange(0, CHUNK)
        inside = some < parts
        some_max = tl.load(part.row_max + first + some, mask=inside, other=float("-inf"))
        total_ptr = part.total + (first + some)[:, None] * VALUES.dim + column[None, :]
        mask = inside[:, None] & (column < VALUES.dim)[None, :]
        some_total = tl.load(total_ptr, mask=mask, other=0.0)
        total += tl.sum(some_total * tl.exp2(some_max - top)[:, None], 0)
    result = total / tl.where(row_sum == 0.0, 1.0, row_sum)
    out_row = out.ptr + (sequence * out.stride_token + head * out.stride_head)
    tl.store(out_row + column, result.to(out.ptr.dtype.element_ty), mask=column < VALUES.dim)
