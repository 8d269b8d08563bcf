"""What only a device can get wrong: pools beyond int32, races, work at full size, batch invariance.

The small operations and the whole engine are here too, each against what it must equal. A check
raises where the device is wrong and returns what it saw.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from bench.accelerator import machine
from bench.accelerator.checks import BRAIN, HALF, Check, attend
from bench.accelerator.contenders import takes_deterministic, tcb
from bench.accelerator.workloads import Tensors, Workload, build, choose, needed_bytes
from tcb import kernels
from tcb.kernels import copy_blocks, gather_blocks, scatter_blocks, write_kv
from tcb.kernels.cpu import operations as torch_ops
from tests.support import oracle
from tests.support.oracle import Case, Problem, assert_close, spread
from tests.support.oracle import build as build_problem

_GIB = 2**30
_REPEATS = 20


def full_size_checks(device: torch.device, small: bool) -> Iterator[tuple[str, Check]]:
    """The timed workloads against fp64 in some sequences, and again and again for the same bits."""
    for workload in choose(small):
        yield f"full size, {workload.name}", _full_size(workload, device, 2 if small else _REPEATS)


def _full_size(workload: Workload, device: torch.device, repeats: int) -> Check:
    def check() -> dict[str, Any]:
        if machine.free_memory(device) < 2 * needed_bytes(workload):
            return {"skipped": f"{2 * needed_bytes(workload) / _GIB:.0f} GiB do not fit"}
        tensors = build(workload, device, seed=3)
        call = tcb(workload, tensors)
        result = call()
        out = result.clone()
        errors = [_sequence_error(workload, tensors, out, i) for i in _some(workload)]
        # other work on the device changes who runs when
        noise = torch.randn(1024 if device.type != "cpu" else 16, 1024, device=device)
        for turn in range(repeats):
            result.fill_(float("nan"))
            with machine.side_stream(device, call):
                for _ in range(turn):
                    torch.mm(noise, noise.T)
            assert torch.equal(result, out), f"run {turn + 2} of the same call gave other bits"
        return {"errors": errors, "runs": repeats + 1}

    return check


def _some(workload: Workload) -> list[int]:
    last = len(workload.sequences) - 1
    return sorted({0, last // 2, last})


def _sequence_error(workload: Workload, tensors: Tensors, out: torch.Tensor, row: int) -> float:
    """Hold one sequence and the last group of heads to the oracle."""
    group = workload.heads // workload.kv_heads
    rows = slice(*tensors.query_start[row : row + 2].tolist())
    kept = slice(*tensors.key_start[row : row + 2].tolist())
    query = tensors.query[rows, -group:]
    keys, values = tensors.keys[kept, -1:], tensors.values[kept, -1:]
    case = Case((), dtype=query.dtype, window=workload.window)
    given = case, None
    exact = oracle.attend(query, keys, values, *given, torch.float64)
    rounded = oracle.attend(query, keys, values, *given, query.dtype)
    magnitude = oracle.attend(query, keys, values.abs(), *given, torch.float64)
    largest = oracle.score(query, keys, case, torch.float64).abs().max().item()
    allowed = oracle.tolerance(case, exact, rounded, magnitude, largest)
    got = out[rows, -group:]
    assert torch.isfinite(got).all(), f"sequence {row} is not finite"
    error = (got.double() - exact).abs().max().item()
    assert error <= allowed, f"sequence {row}: error {error:.3g} > {allowed:.3g}"
    return error


def overflow_checks(device: torch.device, small: bool) -> Iterator[tuple[str, Check]]:
    """Pools with blocks beyond 2^31, and where memory allows 2^32, elements: the same bits."""
    for bits in (20,) if small else (31, 32):
        for decode in (False, True):
            kind = "decode" if decode else "attention"
            yield f"pool beyond 2^{bits} elements, {kind}", _far_blocks(bits, decode, device)
        yield f"pool beyond 2^{bits} elements, moves", _far_moves(bits, device)
    bits = 17 if small else 31
    # 42 tokens: 32 and more of these strides
    yield f"tokens beyond 2^{bits} elements, attention", _far_tokens(2 ** (bits - 5), device)


def _far_blocks(bits: int, decode: bool, device: torch.device) -> Check:
    def check() -> dict[str, Any]:
        shape = {"heads": 8, "kv_heads": 4, "dim": 128, "page_size": 64, "dtype": HALF}
        lengths = ((200, 0), (0, 0), (77, 0)) if decode else ((130, 20), (70, 1), (0, 9))
        case = Case(lengths, decode=decode, **shape)
        near = build_problem(case, device)
        blocks, *block = near.key_cache.shape
        count = 2**bits // near.key_cache[0].numel() + blocks
        needed = 2 * count * near.key_cache[0].nbytes
        if device.type != "cpu" and needed > 0.9 * machine.free_memory(device):
            return {"skipped": f"{needed / _GIB:.0f} GiB do not fit the free memory"}
        caches = []
        for cache in (near.key_cache, near.value_cache):
            caches.append(torch.empty(count, *block, dtype=HALF, device=device))
            caches[-1][-blocks:] = cache
        table = torch.where(near.block_table < 0, -1, near.block_table + count - blocks)
        far = replace(near, key_cache=caches[0], value_cache=caches[1], block_table=table)
        expected, out = attend(near, case), attend(far, case)
        machine.synchronize(device)
        assert_close(expected, near)
        assert torch.equal(out, expected), "blocks far away gave other bits"
        return {"elements": caches[0].numel(), "GiB": needed / _GIB}

    return check


def _far_moves(bits: int, device: torch.device) -> Check:
    """Writing, copying, gathering and scattering at the far end of a pool."""

    def check() -> dict[str, Any]:
        page, heads, dim = 64, 4, 128
        elements = page * heads * dim
        count = 2**bits // elements + 3
        needed = count * elements * 2
        if device.type != "cpu" and 1.1 * needed > machine.free_memory(device):
            return {"skipped": f"{needed / _GIB:.0f} GiB do not fit the free memory"}
        pool = torch.empty(count, elements, dtype=BRAIN, device=device)
        pool[:4], pool[-3:] = 1.0, 2.0
        key, value = torch.randn(2, 2, heads, dim, device=device).to(BRAIN)
        cache = pool.view(count, page, heads, dim)
        slot = torch.tensor([(count - 1) * page + 5, (count - 2) * page], device=device)
        write_kv(key, key, cache, cache, slot)
        assert torch.equal(cache[-1, 5], key[0]) and torch.equal(cache[-2, 0], key[1])
        write_kv(value, value, cache, cache, slot)
        assert torch.equal(cache[-1, 5], value[0])
        far = torch.tensor([count - 1, count - 2], device=device)
        near = torch.tensor([1, 2], device=device)
        copy_blocks(pool, far, near)
        assert torch.equal(pool[1], pool[-1]) and torch.equal(pool[2], pool[-2])
        taken = torch.empty(2, elements, dtype=BRAIN, device=device)
        gather_blocks(pool, far, taken)
        assert torch.equal(taken[0], pool[-1])
        scatter_blocks(taken.flip(0).contiguous(), pool, far)
        assert torch.equal(pool[-2], taken[0]) and torch.equal(pool[-1], taken[1])
        assert (pool[0] == 1).all() and (pool[3] == 1).all(), "blocks nearby were written"
        assert (pool[-3] == 2).all(), "a block beside was written"
        return {"elements": pool.numel()}

    return check


def _far_tokens(stride: int, device: torch.device) -> Check:
    def check() -> dict[str, Any]:
        case = Case(((20, 30), (5, 12)), heads=4, kv_heads=2, dim=64, dtype=HALF)
        near = build_problem(case, device)
        tokens = near.query.shape[0]
        needed = 4 * tokens * stride * 2
        if device.type != "cpu" and 1.2 * needed > machine.free_memory(device):
            return {"skipped": f"{needed / _GIB:.0f} GiB do not fit the free memory"}
        names = "query", "key", "value"
        far = replace(near, **{name: spread(getattr(near, name), 0, stride) for name in names})
        out = attend(far, case, out=spread(torch.full_like(near.query, float("nan")), 0, stride))
        machine.synchronize(device)
        assert_close(out, near)
        return {"elements": tokens * stride, "GiB": needed / _GIB}

    return check


def invariance_checks(device: torch.device, small: bool) -> Iterator[tuple[str, Check]]:
    """With `deterministic`: the same bits alone, in any batch, however chunked at pages."""
    for window in (None, 50):
        name = "full" if window is None else "window"
        yield f"batch invariance, {name}", _invariance(window, device, small)


def _invariance(window: int | None, device: torch.device, small: bool) -> Check:
    def check() -> dict[str, Any]:
        if not takes_deterministic():
            return {"skipped": "torch operations are not `deterministic`"}
        shape = {"heads": 4, "kv_heads": 2, "dim": 16 if small else 128, "page_size": 16}
        shape |= {"dtype": HALF if small else BRAIN, "window": window}
        chunks = ((64, 1), (0, 20)) if small else ((4000, 1), (0, 330), (160, 200), (5, 1))
        _alone_and_reversed(Case(chunks, **shape), device)
        _chunked(Case(((0, 96 if small else 1600),), **shape), device)
        return {"window": window}

    return check


def _alone_and_reversed(case: Case, device: torch.device) -> None:
    problem = build_problem(case, device)
    together = attend(problem, case, deterministic=True)
    assert_close(together, problem)
    count = len(case.sequences)
    for rows in ([i] for i in range(count)):
        part, tokens = _sequences(problem, rows)
        alone = attend(part, case, deterministic=True)
        assert torch.equal(alone, together[tokens]), f"sequence {rows[0]} alone has other bits"
    part, tokens = _sequences(problem, list(reversed(range(count))))
    assert torch.equal(attend(part, case, deterministic=True), together[tokens]), "order matters"


def _sequences(problem: Problem, rows: list[int]) -> tuple[Problem, torch.Tensor]:
    """Some sequences of a problem in another order, and where their tokens were."""
    device = problem.query.device
    starts = problem.query_start.tolist()
    tokens = torch.cat([torch.arange(starts[i], starts[i + 1], device=device) for i in rows])
    lengths = torch.tensor([0, *(starts[i + 1] - starts[i] for i in rows)], device=device)
    row = torch.tensor(rows, device=device)
    changes = {name: getattr(problem, name)[tokens] for name in ("query", "key", "value")}
    changes |= {name: getattr(problem, name)[row] for name in ("block_table", "context_len")}
    return replace(problem, query_start=lengths.cumsum(0).int(), **changes), tokens


def _chunked(case: Case, device: torch.device) -> None:
    """A prompt in one chunk, in several that end at page borders, and single tokens of it."""
    ((_, length),) = case.sequences
    problem = build_problem(case, device)
    whole = attend(problem, case, deterministic=True)
    assert_close(whole, problem)
    pages = -(-length // case.page_size)
    shape = pages, case.page_size, *problem.key.shape[1:]
    caches = [new.new_zeros(shape) for new in (problem.key, problem.value)]
    for cache, new in zip(caches, (problem.key, problem.value), strict=True):
        cache.view(-1, *new.shape[1:])[:length] = new
    table = torch.arange(pages, dtype=torch.int32, device=device)[None]
    borders = [0, 2 * case.page_size, 3 * case.page_size, length]
    chunks = [*itertools.pairwise(borders), (case.page_size + 3, case.page_size + 4)]
    for first, last in [*chunks, (length - 1, length)]:
        rows = slice(first, last)
        part = replace(
            problem,
            query=problem.query[rows],
            key=problem.key[rows],
            value=problem.value[rows],
            key_cache=caches[0],
            value_cache=caches[1],
            block_table=table,
            query_start=torch.tensor([0, rows.stop - rows.start], device=device).int(),
            context_len=torch.tensor([rows.start], device=device).int(),
        )
        got = attend(part, case, deterministic=True)
        assert torch.equal(got, whole[rows]), f"positions {rows} in their own chunk: other bits"


def table_checks(device: torch.device, small: bool) -> Iterator[tuple[str, Check]]:
    """`write_kv`, `page_tables` and block moves against their torch meaning, bit by bit."""
    for dtype in (BRAIN, HALF):
        kind = str(dtype).removeprefix("torch.")
        yield f"write_kv and block moves, {kind}", _moves(dtype, device, small)
    yield "page_tables", _tables(device, small)


def _moves(dtype: torch.dtype, device: torch.device, small: bool) -> Check:
    def check() -> dict[str, Any]:
        tokens, blocks, page, heads, dim = (9, 5, 4, 2, 16) if small else (5000, 400, 16, 8, 128)
        new = torch.randn(2, tokens, heads, dim).to(dtype)
        slot = torch.randperm(blocks * page)[:tokens]
        slot[::7] = -1
        wanted = torch.full((2, blocks, page, heads, dim), -1.0, dtype=dtype)
        pair = torch.randperm(2 * blocks)[:8].view(2, 4)
        taken = torch.empty(4, page * heads * dim, dtype=dtype)
        mine = wanted.to(device)
        on_device = [part.to(device) for part in (new, slot, pair, taken)]
        _move(kernels, mine, *on_device)
        _move(torch_ops, wanted, new, slot, pair, taken)
        assert torch.equal(mine.cpu(), wanted), "differs from the torch meaning"
        return {"tokens": tokens}

    return check


def _move(meaning: Any, pool: torch.Tensor, new: Any, slot: Any, pair: Any, taken: Any) -> None:
    """Write, fork, gather and scatter in one pool [2, blocks, page, heads, dim]."""
    flat = pool.view(-1, taken.shape[1])
    meaning.write_kv(*new, *pool, slot)
    meaning.copy_blocks(flat, *pair)
    meaning.gather_blocks(flat, pair[0], taken)
    meaning.scatter_blocks(taken, flat, pair[1].flip(0))


def _tables(device: torch.device, small: bool) -> Check:
    def check() -> dict[str, Any]:
        rows, page = (5, 4) if small else (300, 16)
        # a full group, with a column for every page, and a ring
        widths = 40, 6
        pages = torch.arange(2 * rows) % 3
        chunk = torch.arange(rows) % 7
        given = {
            "edit": torch.randint(0, 2000, (int(pages.sum()),)).int(),
            "edit_start": torch.cat([pages[:1] * 0, pages.cumsum(0)]).int(),
            "edit_page": (torch.arange(2 * rows) * 5 % (widths[0] - 3)).int(),
            "row": torch.randperm(rows),
            "query_start": torch.cat([chunk[:1] * 0, chunk.cumsum(0)]).int(),
            "context_len": (torch.arange(rows) * 13 % ((widths[0] - 2) * page)).int(),
        }
        tables = [torch.randint(-1, 2000, (rows, width)).int() for width in widths]
        on_device = [table.to(device) for table in tables]
        moved = {name: tensor.to(device) for name, tensor in given.items()}
        mine = kernels.page_tables(on_device, **moved, page_size=page)
        wanted = torch_ops.page_tables(tables, **given, page_size=page)
        for got, right in zip(on_device, tables, strict=True):
            assert torch.equal(got.cpu(), right), "edits differ"
        assert torch.equal(mine[0].cpu(), wanted[0]), "slots differ"
        for got, right in zip(mine[1], wanted[1], strict=True):
            assert torch.equal(got.cpu(), right), "block tables differ"
        return {"rows": rows}

    return check
