"""Causal attention of packed chunks whose context lies in pages: programs that walk a work list.

    out[t, h] = sum_j softmax_j(scale * query[t, h] . key[j, h // q_per_kv]) value[j, h // q_per_kv]

over the positions j that token t sees. The query heads that share a key-value head are packed into
the rows of a tile: row r of a sequence is token r // Q_PER_KV, head r % Q_PER_KV.
"""

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from tcb.kernels.contract import Attention, BatchShape, Listing, WorkList
from tcb.kernels.gpu import work_list as lists
from tcb.kernels.gpu.launch import Cache, Launch, Rows, Width, start
from tcb.kernels.gpu.tile import (
    Factors,
    Pages,
    Source,
    add_sink,
    attend_tiles,
    block_width,
    divide,
    fold_options,
    load_rows,
    no_keys,
)
from tcb.kernels.gpu.tuning import DeviceFacts, Tile, choose_tile, read_device

# programs of the grid for each processor of the device: more than run at once on any of them, so
# that the hardware keeps each as full as it can; they take the tiles in turn, the longest first
_PROGRAMS = 8


def attend(problem: Attention, deterministic: bool, work_list: WorkList | None) -> Tensor:
    """`paged_attention` of a problem that was checked."""
    query, value, out = problem.query, problem.value, problem.out
    if out is None:
        out = query.new_zeros(*query.shape[:2], value.shape[2])
    if query.shape[0] and problem.context_len.shape[0]:
        facts = read_device(query.device.type, query.device.index)
        lengths = problem.query_start, problem.context_len
        listing = Listing(query, value, *lengths, problem.options.window, deterministic)
        tiles = choose_tiles(facts, listing)
        work = work_list
        if work is None:
            work = fill_list(lists.reserve(tiles[0], query.device), listing)
        start(plan_launches(facts, problem._replace(out=out), tiles, work), query)
    return out


def list_work(problem: Listing) -> WorkList:
    """`list_work` of a problem that was checked."""
    return fill_list(reserve_list(problem), problem)


def reserve_list(problem: Listing) -> WorkList:
    """An unfilled list for a problem that was checked."""
    device = problem.query.device
    shape, _, _ = choose_tiles(read_device(device.type, device.index), problem)
    return lists.reserve(shape, device)


def fill_list(work: WorkList, problem: Listing) -> WorkList:
    """The list, filled with the tiles of a batch of its shape."""
    start(lists.plan_launches(work, problem.query_start, problem.context_len), problem.query)
    return work


def choose_tiles(facts: DeviceFacts, problem: Listing) -> tuple[BatchShape, Tile, Tile]:
    """Return (shape of the work list, narrow tile, tile of the other sequences).

    If deterministic, narrow tiles serve all: a token meets the same code and the same tiles of
    keys wherever its row lies.
    """
    query, value, sequences = problem.query, problem.value, problem.context_len.shape[0]
    tokens, heads, dim = query.shape
    # heads and their sizes are numbers of a model, even where a trace holds symbols for them
    q_per_kv, largest = int(heads // value.shape[1]), int(max(dim, value.shape[2]))
    size = query.element_size(), largest, q_per_kv, facts.shared
    narrow = choose_tile(facts.name, "narrow", *size)
    wide = narrow if problem.deterministic else choose_tile(facts.name, "wide", *size)
    small_rows, tile_rows = narrow.rows, wide.rows
    if problem.deterministic or (sequences == 1 and tokens * q_per_kv > narrow.rows):
        small_rows = 0
    elif tokens * q_per_kv <= narrow.rows:
        tile_rows = 0
    shape = BatchShape(tokens, sequences, q_per_kv, problem.window, small_rows, tile_rows)
    return shape, narrow, wide


def plan_launches(
    facts: DeviceFacts,
    problem: Attention,
    tiles: tuple[BatchShape, Tile, Tile],
    work: WorkList,
) -> Iterator[Launch]:
    """A narrow launch for sequences of few rows and a wide one for the rest, from static shapes.

    The problem has an `out`.
    """
    shape, narrow, wide = tiles
    work = lists.fit(work, shape)
    query, key, value, key_cache, value_cache, block_table, *lengths, options, out = problem
    assert out is not None, "out: expected a tensor, got None"
    dim, (kv_heads, value_dim) = query.shape[2], value.shape[1:]
    factors, has = fold_options(options, query, facts)
    rows = Rows.of(query), Rows.of(key), Rows.of(value)
    records = *rows, Cache.of(key_cache), Cache.of(value_cache), Rows.of(out)
    integers = block_table, *lengths
    sinks = query if options.sinks is None else options.sinks
    constants = {
        "KEYS": Width(dim, block_width(dim), key_cache.stride(1), key.stride(0)),
        "VALUES": Width(value_dim, block_width(value_dim), value_cache.stride(1), value.stride(0)),
        "KV_HEADS": kv_heads,
        "Q_PER_KV": shape.q_per_kv,
        "PAGE_SIZE": key_cache.shape[1],
        "ALIGN": shared_alignment(key, value, key_cache, value_cache),
        "HAS": has,
    }
    shares = [(narrow, *work.small())] if shape.small_rows else []
    shares += [(wide, *work.tiles())] if shape.tile_rows else []
    for tile, item, count in shares:
        lengths_and_options = block_table.shape[1], options.window or 0, factors
        arguments = *records, *integers, sinks, item, count, *lengths_and_options
        yield Launch(
            paged_attention_kernel,
            min(facts.processors * _PROGRAMS, item.shape[0] * kv_heads),
            (*arguments, block_table.stride(0)),
            constants
            | {"BLOCK_M": tile.rows, "BLOCK_N": tile.keys, "ZONES": tile.zones}
            | tile.launch_options(),
        )


def shared_alignment(*tensors: Tensor) -> int:
    """Elements in 16 bytes, the widest load, if all tensors begin and step on 16 bytes; else 1."""
    size = tensors[0].element_size()
    steps = (step * size for tensor in tensors for step in tensor.stride()[:-1])
    starts = (tensor.data_ptr() for tensor in tensors)
    return 1 if any(number % 16 for number in (*starts, *steps)) else 16 // size


@triton.jit
def distance(there_ptr, here_ptr, ALIGN: tl.constexpr):
    """Elements from here_ptr to there_ptr, a multiple of ALIGN."""
    BITS: tl.constexpr = here_ptr.dtype.element_ty.primitive_bitwidth
    elements = (there_ptr.to(tl.int64) - here_ptr.to(tl.int64)) // (BITS // 8)
    return tl.multiple_of(elements, ALIGN)


@triton.jit
def find_source(cache: Cache, chunk: Rows, head, origin, WIDTH: tl.constexpr, ALIGN: tl.constexpr):
    """Keys or values of one head; origin is where the chunk would have position 0's row."""
    ptr = cache.ptr + head * cache.stride_head
    chunk_ptr = chunk.ptr + (origin * WIDTH.stride_token + head * chunk.stride_head)
    return Source(ptr, cache.stride_block, distance(chunk_ptr, ptr, ALIGN))


# the integers of a batch are parts of larger tensors, so their alignment is that of chance
@triton.jit(
    do_not_specialize=["count_ptr", "columns", "window", "stride_table_sequence"],
    do_not_specialize_on_alignment=["block_table_ptr", "query_start_ptr", "context_len_ptr"],
)
def paged_attention_kernel(
    query: Rows,
    key: Rows,
    value: Rows,
    key_cache: Cache,
    value_cache: Cache,
    out: Rows,
    block_table_ptr,
    query_start_ptr,
    context_len_ptr,
    sinks_ptr,
    item_ptr,
    count_ptr,
    columns,
    window,
    factors: Factors,
    stride_table_sequence,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    Q_PER_KV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ALIGN: tl.constexpr,
    HAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ZONES: tl.constexpr,
):
    """Attend from every tile of a work list, for each key-value head, whatever the grid is.

    Program p of P serves the pairs (item, head) p, p + P, p + 2P, ... of the list. ZONES walks the
    tiles of keys between the left edge of the window and the diagonal without masks.
    """
    for work in tl.range(tl.program_id(0), tl.load(count_ptr) * KV_HEADS, tl.num_programs(0)):
        head = tl.cast(work % KV_HEADS, tl.int64)
        sequence = tl.load(item_ptr + work // KV_HEADS * 2)
        first_row = tl.load(item_ptr + work // KV_HEADS * 2 + 1) * BLOCK_M
        query_start = tl.load(query_start_ptr + sequence)
        rows = (tl.load(query_start_ptr + sequence + 1) - query_start) * Q_PER_KV
        context_len = tl.load(context_len_ptr + sequence)

        row = first_row + tl.arange(0, BLOCK_M)
        inside = row < rows
        token = (query_start + row // Q_PER_KV).to(tl.int64)
        query_head = head * Q_PER_KV + row % Q_PER_KV
        query_row = query.ptr + (token * query.stride_token + query_head * query.stride_head)
        queries = load_rows(query_row, inside, KEYS, True)
        first_position = context_len + first_row // Q_PER_KV
        last_position = context_len + tl.minimum(first_row + BLOCK_M - 1, rows - 1) // Q_PER_KV
        position = tl.minimum(context_len + row // Q_PER_KV, last_position)

        first_key = tl.maximum(first_position - window + 1, 0) if HAS.window else 0
        end_key = last_position + 1
        first_tile = first_key // BLOCK_N
        end_tile = tl.cdiv(end_key, BLOCK_N)
        chunk_origin = (query_start - context_len).to(tl.int64)
        keys = find_source(key_cache, key, head, chunk_origin, KEYS, ALIGN)
        values = find_source(value_cache, value, head, chunk_origin, VALUES, ALIGN)
        table_ptr = block_table_ptr + sequence.to(tl.int64) * stride_table_sequence

        sums = no_keys(BLOCK_M, VALUES.block)
        full_tile = first_tile
        edge_tile = first_tile
        if ZONES:
            # every row sees all of the tiles [full_tile, edge_tile)
            edge_tile = tl.maximum((first_position + 1) // BLOCK_N, first_tile)
            if HAS.window:
                full_tile = tl.cdiv(tl.maximum(last_position - window + 1, 0), BLOCK_N)
                full_tile = tl.minimum(tl.maximum(full_tile, first_tile), end_tile)
                edge_tile = tl.maximum(edge_tile, full_tile)
        for zone in tl.static_range(3):
            # 0: left edge of the window, 1: full, 2: diagonal
            if zone == 2 or (ZONES and (zone == 1 or HAS.window)):
                sums = attend_tiles(
                    sums,
                    queries,
                    position,
                    first_tile if zone == 0 else (full_tile if zone == 1 else edge_tile),
                    full_tile if zone == 0 else (edge_tile if zone == 1 else end_tile),
                    first_key,
                    end_key,
                    context_len,
                    window,
                    factors,
                    keys,
                    values,
                    Pages(table_ptr, columns),
                    KEYS,
                    VALUES,
                    PAGE_SIZE,
                    BLOCK_N,
                    HAS,
                    HAS_CHUNK=True,
                    MASKED=zone != 1,
                )
        total, row_max, row_sum = sums
        # rows and heads anew, from a value that the compiler cannot know: kept for the epilogue
        # they would hold up to 57 registers a thread through the loops (sm_80, head size 256)
        row += tl.load(query_start_ptr + sequence, volatile=True) - query_start
        inside = row < rows
        token = (query_start + row // Q_PER_KV).to(tl.int64)
        query_head = head * Q_PER_KV + row % Q_PER_KV
        if HAS.sinks:
            sink = tl.load(sinks_ptr + query_head).to(tl.float32) * 1.4426950408889634
            total, row_sum = add_sink(total, row_max * factors.score, row_sum, sink)
        out_row = out.ptr + (token * out.stride_token + query_head * out.stride_head)
        column = tl.arange(0, VALUES.block)
        tl.store(
            out_row[:, None] + column[None, :],
            divide(total, row_sum).to(out.ptr.dtype.element_ty),
            mask=inside[:, None] & (column < VALUES.dim)[None, :],
        )
