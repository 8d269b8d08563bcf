"""Cases on the edges of what the paged operations take, each of which has broken a kernel before.

Lengths, masks and layouts in combination are in the matrix; here is what it cannot reach: strides
and block ids beyond 32 bits, rings that wrap many times, launches that are replayed.
"""

from contextlib import nullcontext
from dataclasses import fields, replace

import pytest
import torch
import triton
import triton.language as tl

from tcb.kernels import copy_blocks, page_tables, paged_attention, paged_decode, write_kv
from tests.kernels.fences import fenced, poisoned_memory, recorded, run_last
from tests.kernels.test_paged_attention import attend as attend_chunks
from tests.kernels.test_paged_decode import attend as attend_tokens
from tests.support.oracle import Case, assert_close, attend, build, score, spread, tolerance

HALF = torch.float16
NAN = float("nan")


def run(case, problem, **options):
    return (attend_tokens if case.decode else attend_chunks)(problem, case, **options)


# (queries, keys) that have broken other kernels
QUERIES_AND_KEYS = [(129, 463), (1, 1328), (1, 2011), (3, 799), (113, 203), (511, 513)]
WINDOWED = Case(((3577 - 2048, 2048),), heads=1, kv_heads=1, window=33, page_size=64)


@pytest.mark.parametrize("queries, keys", QUERIES_AND_KEYS, ids=str)
def test_long_and_uneven_lengths(queries, keys, device):
    case = Case(((keys - queries, queries),), heads=1, kv_heads=1)
    problem = build(case, device)
    assert_close(run(case, problem), problem)


def test_a_long_chunk_behind_a_long_context(device):
    problem = build(WINDOWED, device)
    assert_close(run(WINDOWED, problem), problem)


@pytest.mark.parametrize("decode", [False, True])
def test_pages_of_128(decode, device):
    sequences = ((127, 0), (129, 0)) if decode else ((127, 3), (129, 1))
    case = Case(sequences, decode=decode, page_size=128, num_splits=3 if decode else None)
    problem = build(case, device)
    assert_close(run(case, problem), problem)


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("chunk", [0, 1, 40])
def test_no_table_is_read_past_its_end(page_size, chunk, device):
    # the context fills all pages there are, and a kernel that looks a page ahead finds no more
    case = Case(((2 * page_size, chunk),), decode=not chunk, page_size=page_size)
    problem = build(case, device)
    full = replace(problem, block_table=problem.block_table[:, :2])
    with fenced():
        assert_close(run(case, full), problem)


# strides, in elements: some multiple of each that is used is more than an int32 counts
CHUNKS = Case(((20, 3), (5, 2), (9, 1)), heads=6, kv_heads=3, page_size=32, dtype=HALF)
TOKENS = Case(((23, 0), (0, 0), (1, 0)), True, 6, 3, page_size=32, dtype=HALF, num_splits=2)
HEADS = {
    "query": (1, 2**29),
    "key": (1, 2**30),
    "value": (1, 2**30),
    "key_cache": (2, 2**30),
    "value_cache": (2, 2**30),
}
SLOTS_AND_ROWS = {"key_cache": (1, 2**27), "value_cache": (1, 2**27), "block_table": (0, 2**30)}


@pytest.mark.parametrize("strides", [HEADS, SLOTS_AND_ROWS], ids=["heads", "slots and rows"])
@pytest.mark.parametrize("case", [CHUNKS, TOKENS], ids=["chunks", "tokens"])
def test_axes_further_apart_than_int32(case, strides, device):
    problem = build(case, device)
    apart = {name: spread(getattr(problem, name), *place) for name, place in strides.items()}
    if case.decode:
        apart |= {"key": problem.key, "value": problem.value}
    out = spread(torch.full_like(problem.query, NAN), 1, 2**29)
    assert_close(run(case, replace(problem, **apart), out=out), problem)


@pytest.mark.parametrize("axis, stride", [(1, 2**28), (2, 2**30)], ids=["slots", "heads"])
def test_slots_and_heads_are_written_further_apart_than_int32(axis, stride, device):
    cache = torch.full((3, 16, 3, 8), 7.0, dtype=HALF, device=device)
    far = [spread(cache, axis, stride) for _ in range(2)]
    new = torch.randn(2, 2, 3, 8, dtype=HALF, device=device)
    new = [spread(tokens, 1, 2**30) for tokens in new]
    write_kv(*new, *far, torch.tensor([15, 39], device=device))
    for written, tokens in zip(far, new, strict=True):
        wanted = cache.clone()
        wanted[[0, 2], [15, 7]] = tokens
        assert torch.equal(written, wanted)


@pytest.mark.parametrize("case", [CHUNKS, TOKENS], ids=["chunks", "tokens"])
def test_high_blocks_of_a_large_pool(case, device):
    # as a server uses them: one pool, moved by blocks, written by slots, read by tables
    problem = build(replace(case, packed=True), device)
    small, count, elements = problem.key_cache, 2**17 + 2 * len(problem.key_cache), 2**14
    width = small.stride(0)
    assert width <= elements
    # 4 GiB of addresses, of which only what is written is ever backed by memory
    pool = torch.empty(count * elements, dtype=HALF, device=device).view(count, elements)
    first = count - 2 * len(small)
    caches = [
        pool.as_strided((count, *small.shape[1:]), (elements, *small.stride()[1:]), offset)
        for offset in (0, case.dim)
    ]
    pool[first:] = NAN
    block, within = small.isfinite().all(-1).all(-1).nonzero().T
    taken = first + block
    written = problem.key_cache[block, within], problem.value_cache[block, within]
    write_kv(*written, *caches, taken * case.page_size + within)
    source = taken.unique()
    target = source + len(small)
    copy_blocks(pool[:, :width], source, target)
    pool[source] = NAN
    table = problem.block_table
    table = torch.where(table < 0, table, table + first + len(small))
    assert int(table.max()) * elements > 2**31
    high = replace(problem, key_cache=caches[0], value_cache=caches[1], block_table=table)
    assert_close(run(case, high), problem)


@pytest.mark.parametrize("window", [16, 21])
def test_a_ring_that_wraps_many_times(window, device):
    # chunks, then tokens one by one; a page that leaves the window is written again with no edit
    case = Case(((0, 90),), heads=2, kv_heads=1, window=window)
    generator = torch.Generator().manual_seed(5)
    query, keys, values = (
        torch.randn(90, heads, 16, generator=generator).to(device) for heads in (2, 1, 1)
    )
    expected = attend(query, keys, values, case, None, torch.float64)
    largest = score(query, keys, case, torch.float64).abs().max().item()
    magnitude = attend(query, keys, values.abs(), case, None, torch.float64)
    same_dtype = attend(query, keys, values, case, None, torch.float32)
    band = tolerance(case, expected, same_dtype, magnitude, largest)
    steps = [5, 1, 12, 20, 3, 16, *[1] * 33]
    assert sum(steps) == 90
    columns = (window - 1 + max(steps) - 1) // 16 + 2
    caches = [torch.full((8, 16, 1, 16), NAN, device=device) for _ in range(2)]
    table = torch.full((1, columns), -1, dtype=torch.int32, device=device)

    def integers(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    free, first = [3, 6, 1, 7, 2, 5], 0
    for count in steps:
        pages = range(-(-first // 16), min(columns, (first + count - 1) // 16 + 1))
        blocks = [free.pop() for _ in pages]
        slot, (block_table,) = page_tables(
            [table],
            integers(*blocks),
            integers(0, len(blocks)),
            integers(pages.start),
            integers(0),
            integers(0, count),
            integers(first),
            16,
        )
        end = first + count
        write_kv(keys[first:end], values[first:end], *caches, slot[0])
        token = paged_decode(
            query[end - 1 : end], *caches, block_table, integers(end), window=window
        )
        results = [(token, expected[end - 1 : end])]
        if count > 1:
            new = query[first:end], keys[first:end], values[first:end]
            lengths = integers(0, count), integers(first)
            out = paged_attention(*new, *caches, block_table, *lengths, window=window)
            results.append((out, expected[first:end]))
        for rows, wanted in results:
            assert torch.isfinite(rows).all()
            assert (rows.double() - wanted).abs().max().item() <= band
        first = end
    assert len(free) == 6 - columns


CAPTURED = Case(((20, 9), (40, 1), (0, 5)), padding=3, spare=3)
REPLAYED = Case(((70, 14), (0, 0), (3, 1)), padding=3)
TOKENS_CAPTURED = Case(((17, 0), (40, 0), (0, 0)), decode=True, num_splits=3, spare=5)
TOKENS_REPLAYED = Case(((0, 0), (1, 0), (120, 0)), decode=True, num_splits=3)


@pytest.mark.parametrize(
    "window, softcap, sinks", [(None, None, None), (19, 9.0, 0.5)], ids=["plain", "all masks"]
)
@pytest.mark.parametrize(
    "captured, replayed",
    [(CAPTURED, REPLAYED), (TOKENS_CAPTURED, TOKENS_REPLAYED)],
    ids=["chunks", "tokens"],
)
def test_a_replay_serves_other_lengths(captured, replayed, window, softcap, sinks, device):
    masks = {"window": window, "softcap": softcap, "sinks": sinks}
    if window is not None:
        # rings of one width, whatever the lengths
        masks["spare"] = 0
    captured, replayed = replace(captured, **masks), replace(replayed, **masks)
    first, second = build(captured, device), build(replayed, device)
    assert first.block_table.shape == second.block_table.shape
    out = torch.full_like(first.query, NAN)
    replay = capture(lambda: run(captured, first, out=out), device)
    out.fill_(NAN)
    replay()
    assert_close(out, first)
    for field in fields(first):
        kept, new = getattr(first, field.name), getattr(second, field.name)
        if isinstance(kept, torch.Tensor) and field.name != "expected":
            kept.copy_(new)
    out.fill_(NAN)
    replay()
    assert_close(out, second)


def capture(call, device):
    """Make the call; return what replays its launches, as a graph where there are graphs."""
    if device.type == "cpu":
        with recorded() as launches:
            call()
        return lambda: [launch() for launch in launches]
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def test_parts_further_apart_than_int32():
    # 20,000 sequences of 4 heads and 128 parts of 256 sums: the last part lies beyond 2^31
    case = Case(((70, 0),), decode=True, kv_heads=1, dim=256, sinks=0.5, num_splits=128)
    problem, count = build(case, torch.device("cpu")), 20_000
    query, table = problem.query.expand(count, -1, -1), problem.block_table.expand(count, -1)
    context_len = torch.zeros(count, dtype=torch.int32)
    context_len[-1] = 70
    many = replace(problem, query=query, block_table=table, context_len=context_len)
    out = torch.empty(count, case.heads, case.dim)
    out[-1] = NAN
    with recorded(run=False) as launches:
        run(case, many, out=out)
    parts, merged = launches
    run_last(parts, 128)
    run_last(merged, case.heads)
    assert_close(out[-1:], problem)


@pytest.mark.parametrize("first, width", [(0, 8), (1, 8), (-1, 8), (0, 7)])
def test_a_step_out_of_bounds_is_seen(monkeypatch, first, width):
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    @triton.jit
    def copy_kernel(source_ptr, target_ptr, first):
        lane = tl.arange(0, 8)
        tl.store(target_ptr + lane, tl.load(source_ptr + first + lane))

    source, target = torch.zeros(16)[4:12], torch.zeros(16)[:width]
    bad = nullcontext() if (first, width) == (0, 8) else pytest.raises(Exception, match="bounds")
    with fenced(), bad:
        copy_kernel[(1,)](source, target, first)


def test_new_memory_is_poisoned():
    with poisoned_memory():
        assert torch.zeros(3).new_empty(2).isnan().all()
        assert torch.empty(3, dtype=HALF).isnan().all()
        assert torch.empty(3, dtype=torch.int32).tolist() == [2**31 - 1] * 3
