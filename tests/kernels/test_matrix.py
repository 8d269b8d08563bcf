"""Every operation on paged memory under every combination of two of the factors that matter, and,
in the full matrix (`make deep`), of three.

The factors and their levels span covering arrays. Each row of one is a small problem whose memory
is poisoned wherever nothing is promised: dead slots of the pool, dead entries of block tables,
outputs, scratch and padding tokens. In the interpreter no element outside the given tensors is
touched.
"""

import random
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from tcb.kernels import (
    copy_blocks,
    gather_blocks,
    page_tables,
    paged_attention,
    paged_decode,
    scatter_blocks,
    write_kv,
)
from tests.kernels.covering import uncovered
from tests.kernels.fences import fenced, poisoned_memory
from tests.kernels.matrix import DAILY_RUNS, PAIRS, RUNS, SIZES, TRIPLES, levels
from tests.support.oracle import assert_close, build

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def bounds(device):
    """Fences around all tensors and poison in all new memory."""
    with ExitStack() as stack:
        stack.enter_context(poisoned_memory())
        if device.type == "cpu":
            stack.enter_context(fenced())
        yield


def bits(tensor):
    """A tensor as integers, so that NaN equals itself."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def read(case, problem):
    """Attend into poisoned outputs within a frame; nothing but the rows of sequences changes."""
    tokens, heads, _ = problem.query.shape
    width = problem.value_cache.shape[3]
    frame = problem.query.new_full((tokens, heads + 2, width + 16), 7.0)
    out = frame[:, 1:-1, 8:-8].fill_(NAN)
    given = problem.key_cache, problem.value_cache, problem.block_table
    before = [bits(tensor).clone() for tensor in given]
    options = {
        "window": case.window,
        "softcap": case.softcap,
        "sinks": problem.sinks,
        "scale": case.scale,
        "out": out,
    }
    if case.decode:
        options["num_splits"] = case.num_splits
        paged_decode(problem.query, *given, problem.context_len, **options)
    else:
        new = problem.query, problem.key, problem.value
        paged_attention(*new, *given, problem.query_start, problem.context_len, **options)
    assert_close(out, problem)
    assert out[len(problem.expected) :].isnan().all()
    out.fill_(7.0)
    assert (frame == 7.0).all()
    for tensor, wanted in zip(given, before, strict=True):
        assert torch.equal(bits(tensor), wanted)


def live_slots(problem):
    """[blocks, page_size]: where the caches hold something finite."""
    return problem.key_cache.isfinite().all(-1).all(-1)


def write(run, problem):
    """Poison up to 64 slots of what the caches hold, then write them, with padding in between."""
    caches = problem.key_cache, problem.value_cache
    page_size, shuffle = run.case.page_size, torch.Generator().manual_seed(run.seed)
    live = live_slots(problem).nonzero()
    some = torch.randperm(len(live), generator=shuffle)[:64].to(live.device)
    block, within = live[some].T
    order = torch.randperm(len(block) + 2, generator=shuffle).to(live.device)
    slot = torch.cat([block * page_size + within, block.new_tensor([-1, -7])])[order]
    written = []
    for cache in caches:
        padding = cache.new_full((2, *cache.shape[2:]), NAN)
        written.append(torch.cat([cache[block, within], padding])[order])
    if run.case.packed:
        written = torch.cat(written, 1).chunk(2, 1)
    wanted = [bits(cache).clone() for cache in caches]
    for cache in caches:
        cache[block, within] = INF
    write_kv(*written, *caches, slot)
    for cache, image in zip(caches, wanted, strict=True):
        assert torch.equal(bits(cache), image)
    return problem


def fork(run, problem):
    """Move every live block elsewhere, by a copy or out of the pool and back; poison the old."""
    key, value = problem.key_cache, problem.value_cache
    count, device = len(key), key.device
    live = live_slots(problem).any(1)
    source = live.nonzero().flatten()
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(run.seed))
    target = count + shuffled.to(device)[: len(source)]
    # a packed pool is one tensor, whose blocks hold keys and values
    starts = [key] if run.case.packed else [key, value]
    pools = []
    for start in starts:
        flat = start.as_strided((count, start.stride(0)), (start.stride(0), 1))
        pool = torch.cat([flat, torch.full_like(flat, NAN)])
        if run.seed % 2:
            taken = pool.new_full((len(source), pool.shape[1]), INF)
            gather_blocks(pool, source, taken)
            pool[:count] = INF
            scatter_blocks(taken, pool, target)
        else:
            # a block onto itself changes nothing
            itself = target.new_tensor([0] if not live[0] else [])
            copy_blocks(pool, torch.cat([source, itself]), torch.cat([target, itself]))
        assert torch.equal(bits(pool[target]), bits(flat[source]))
        pool[:count] = INF
        untouched = torch.ones(len(pool), dtype=torch.bool, device=device)
        untouched[target] = False
        assert not pool[untouched].isfinite().any()
        pools.append(pool)
    views = []
    for view, pool in zip((key, value), (pools[0], pools[-1]), strict=True):
        offset = view.storage_offset() - key.storage_offset() if run.case.packed else 0
        views.append(pool.as_strided((2 * count, *view.shape[1:]), view.stride(), offset))
    table = problem.block_table.clone()
    renamed = torch.arange(count, dtype=torch.int32, device=device)
    renamed[source] = target.int()
    named = (table >= 0) & (table < count)
    table[named] = renamed[table[named].long()]
    return replace(problem, key_cache=views[0], value_cache=views[1], block_table=table)


def serve(run, problem):
    """A step as a server takes it: edit the tables, find the slots, write, attend; then a token."""
    case, device = run.case, problem.key_cache.device
    rng = random.Random(run.seed)
    groups = [our_group(case, problem), other_group(case, rng)]
    order = rng.sample(range(2), 2)
    ours, groups = order.index(0), [groups[which] for which in order]
    rows = rng.sample(range(len(case.sequences) + 2), len(case.sequences))

    def integers(values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=device)

    tables, wanted, slots = [], [], []
    for table, edits in groups:
        # rows that are not in the batch hold anything
        whole = [[2**31 - 1] * len(table[0]) for _ in range(len(rows) + 2)]
        for row, entries in zip(rows, table, strict=True):
            whole[row] = list(entries)
        tables.append(integers(whole))
        slots.append([])
        for row, (first, blocks), (context, chunk) in zip(rows, edits, case.sequences, strict=True):
            for page, block in enumerate(blocks, first):
                whole[row][page % len(whole[row])] = block
            for position in range(context, context + chunk):
                page, within = divmod(position, case.page_size)
                slots[-1].append(whole[row][page % len(whole[row])] * case.page_size + within)
        slots[-1] += [-1] * case.padding
        wanted.append(whole)
    edits = [edit for _, edits in groups for edit in edits]
    slot, block_tables = page_tables(
        tables,
        integers([block for _, blocks in edits for block in blocks] + [77]),
        integers([0, *(len(blocks) for _, blocks in edits)]).cumsum(0, dtype=torch.int32),
        integers([first for first, _ in edits]),
        integers(rows, rng.choice((torch.int32, torch.int64))),
        problem.query_start,
        problem.context_len,
        case.page_size,
        slot=torch.full((2, len(slots[0])), 2**62, device=device),
    )
    assert [table.tolist() for table in tables] == wanted
    assert slot.tolist() == slots
    for block_table, whole in zip(block_tables, wanted, strict=True):
        assert block_table.tolist() == [whole[row] for row in rows]
    problem = replace(problem, block_table=block_tables[ours])
    write_kv(problem.key, problem.value, problem.key_cache, problem.value_cache, slot[ours])
    read(case, problem)
    # the newest position of each sequence once more, now that its key is in the cache
    last = problem.query_start[1:].long() - 1
    token = replace(
        problem,
        query=problem.query[last],
        context_len=problem.context_len + problem.query_start.diff(),
        expected=problem.expected[last],
    )
    read(replace(case, decode=True), token)


def our_group(case, problem):
    """Block tables before a step and, a sequence, its first new page and the blocks from it on."""
    table, live = problem.block_table.tolist(), live_slots(problem).any(1).tolist()
    named = {block for row in table for block in row}
    free = [block for block in range(len(live)) if block not in named]
    edits = []
    for row, (context, chunk) in zip(table, case.sequences, strict=True):
        first, end = context // case.page_size, (context + chunk - 1) // case.page_size + 1
        known = row[first % len(row)]
        # unless the new tokens begin the page, or no query sees the older ones in it
        first += 0 <= known < len(live) and live[known]
        edits.append((first, [free.pop() for _ in range(first, end)]))
    return table, edits


def other_group(case, rng):
    """The same of layers of another window: a table of another width, and new pages throughout."""
    pages = []
    for context, chunk in case.sequences:
        pages.append((context // case.page_size, (context + chunk - 1) // case.page_size + 1))
    columns = max(end - first for first, end in pages) + rng.randrange(3)
    table = [[rng.randrange(-1, 500) for _ in range(columns)] for _ in pages]
    return table, [(first, rng.sample(range(500), end - first)) for first, end in pages]


@pytest.mark.parametrize("run", DAILY_RUNS, ids=str)
def test_values(run, device):
    check(run, device)


@pytest.mark.deep
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_values_of_every_triple(run, device):
    check(run, device)


def check(run, device):
    problem = build(run.case, device)
    match run.contract:
        case "write":
            read(run.case, write(run, problem))
        case "fork":
            read(run.case, fork(run, problem))
        case "tables":
            serve(run, problem)
        case _:
            read(run.case, problem)


def test_every_pair_and_every_triple_of_levels_is_run():
    found = [levels(run) for run in RUNS]
    assert len(found) >= 300
    assert uncovered(found, SIZES, PAIRS) == []
    assert uncovered(found, SIZES, TRIPLES) == []
    assert uncovered([levels(run) for run in DAILY_RUNS], SIZES, PAIRS) == []


def test_a_combination_that_is_not_run_is_found():
    found = [levels(run) for run in RUNS]
    fewer = [row for row in found if row[:3] != found[7][:3]]
    assert ((0, 1, 2), found[7][:3]) in uncovered(fewer, SIZES, TRIPLES)
    # one row fewer than the two widest columns have pairs of levels
    assert uncovered(found[: 9 * 8 - 1], SIZES, PAIRS)


@pytest.mark.parametrize("runs", [RUNS, DAILY_RUNS], ids=["triples", "pairs"])
def test_runs_are_what_their_contract_says(runs):
    for run in runs:
        contexts, chunks = zip(*run.case.sequences, strict=True)
        match run.contract:
            case "fresh":
                assert not any(contexts)
                assert all(chunks)
            case "chunk" | "tables":
                assert any(contexts)
                assert all(chunk > 1 for chunk in chunks)
            case "mixed":
                assert {0, 1} < set(chunks)
                assert 0 in contexts
            case "decode" | "split":
                assert run.case.decode
                assert (run.case.num_splits is None) == (run.contract == "decode")
    forms = {(run.contract, run.case.decode) for run in runs}
    assert {(name, form) for name in ("write", "fork") for form in (False, True)} <= forms
