"""Attention on the device against dense fp64: few kernels to compile, many lengths through each.

A check is a name and a function that raises where the device is wrong and returns what it saw. It
knows the oracle of the tests, and no clock.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from bench.accelerator import machine
from tcb.kernels import paged_attention, paged_decode
from tests.support.oracle import Case, Problem, assert_close
from tests.support.oracle import build as build_problem

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
Check = Callable[[], dict[str, Any]]

# lengths that have bitten: single tokens, edges of pages and tiles, empty ones, one long chunk
_CHUNKS = ((0, 1), (2, 1), (1327, 1), (63, 1), (64, 1), (65, 1), (0, 2), (796, 3), (13, 5), (0, 17))
_CHUNKS += ((0, 0), (7, 0), (90, 113), (334, 129), (2, 511), (1529, 640))
_LENGTHS = (1, 2, 15, 16, 17, 0, 63, 64, 65, 255, 256, 257, 1328, 2011, 0, 4096)
_INF = float("inf")


@dataclass(frozen=True, slots=True)
class Family:
    """Shapes and options that share kernels; cases differ in lengths, splits and dtype."""

    name: str
    case: Case


FAMILIES = (
    Family("llama", Case((), heads=8, kv_heads=2, dim=128, page_size=256)),
    Family("sliding", Case((), heads=8, kv_heads=2, dim=128, page_size=16, window=100)),
    Family(
        "everything",
        Case((), heads=8, kv_heads=2, dim=128, page_size=64, window=65, softcap=30.0, sinks=1.0),
    ),
    Family("gpt-oss", Case((), heads=16, kv_heads=2, dim=64, page_size=64, window=128, sinks=0.5)),
    Family("gemma", Case((), heads=4, kv_heads=2, dim=256, page_size=256, window=512, softcap=50)),
    Family("qwen", Case((), heads=14, kv_heads=2, dim=64, page_size=32)),
    Family("phi", Case((), heads=6, kv_heads=2, dim=96, page_size=128)),
    Family("no groups", Case((), heads=4, kv_heads=4, dim=80, page_size=16)),
    Family("wide group", Case((), heads=32, kv_heads=1, dim=128, page_size=64)),
    Family("latent", Case((), heads=4, kv_heads=4, dim=192, value_dim=128, page_size=64)),
    Family("packed", Case((), heads=10, kv_heads=2, dim=128, page_size=64, packed=True)),
    Family("odd page", Case((), heads=4, kv_heads=2, dim=64, page_size=12, window=33)),
)


def attention_checks(device: torch.device, small: bool) -> Iterator[tuple[str, Check]]:
    """Every family in bf16 and fp16, the first ones in fp32 too; chunks, decodes, splits."""
    for number, family in enumerate(FAMILIES[1:3] if small else FAMILIES):
        dtypes = (BRAIN, HALF, FULL) if number < 3 else (BRAIN, HALF)
        for dtype in dtypes[:1] if small else dtypes:
            chunks, decode = _cases(replace(family.case, dtype=dtype), small)
            kind = str(dtype).removeprefix("torch.")
            yield f"attention, {family.name}, {kind}", _held_to_oracle(chunks, device)
            yield f"decode, {family.name}, {kind}", _held_to_oracle(decode, device)


def _cases(case: Case, small: bool) -> tuple[list[Case], list[Case]]:
    chunks = replace(case, sequences=_CHUNKS, padding=5)
    decode = replace(case, sequences=tuple((n, 0) for n in _LENGTHS), decode=True)
    if small:
        changes = {"heads": 4, "kv_heads": 2, "dim": 16, "page_size": min(case.page_size, 16)}
        chunks = replace(chunks, sequences=((65, 1), (13, 40), (0, 0)), **changes)
        decode = replace(decode, sequences=((65, 0), (0, 0), (130, 0)), **changes)
    extreme = [replace(chunks, magnitude=300.0), replace(chunks, sinks=-_INF)]
    splits = [replace(decode, num_splits=count) for count in (1, 3)]
    if case.sinks is None:
        extreme.pop()
    return ([chunks], [decode, splits[1]]) if small else ([chunks, *extreme], [decode, *splits])


def attend(problem: Problem, case: Case, **options: Any) -> torch.Tensor:
    """The operation that a case is for."""
    shared = {
        "window": case.window,
        "softcap": case.softcap,
        "sinks": problem.sinks,
        "scale": case.scale,
    }
    pages = problem.key_cache, problem.value_cache, problem.block_table
    if case.decode:
        splits = {"num_splits": case.num_splits}
        splits = {} if case.num_splits is None else splits
        return paged_decode(
            problem.query, *pages, problem.context_len, **splits, **shared, **options
        )
    new = problem.query, problem.key, problem.value
    lengths = problem.query_start, problem.context_len
    return paged_attention(*new, *pages, *lengths, **shared, **options)


def _held_to_oracle(cases: list[Case], device: torch.device) -> Check:
    def check() -> dict[str, Any]:
        seen = []
        for case in cases:
            problem = build_problem(case, device)
            shape = problem.query.shape[0], problem.query.shape[1], problem.value_cache.shape[3]
            # poison: what is not written shows
            out = torch.full(shape, float("nan"), dtype=case.dtype, device=device)
            attend(problem, case, out=out)
            machine.synchronize(device)
            assert_close(out, problem)
            error = _error(out, problem)
            again = attend(problem, case, out=torch.full_like(out, float("nan")))
            rows = len(problem.expected)
            assert torch.equal(again[:rows], out[:rows]), "the same call gave other bits"
            seen.append({"case": str(case)[-80:], "error": error, "tolerance": problem.tolerance})
        return {"cases": seen}

    return check


def _error(out: torch.Tensor, problem: Problem) -> float:
    rows = out[: len(problem.expected)]
    return (rows.double() - problem.expected).abs().max().item() if rows.numel() else 0.0


def replay_checks(device: torch.device, small: bool) -> Iterator[tuple[str, Check]]:
    """A graph captured with some lengths, replayed with others in the same tensors."""
    shape = {"heads": 4, "kv_heads": 2, "dim": 16 if small else 128, "page_size": 16}
    shape |= {"dtype": HALF if small else BRAIN}
    longest = 90 if small else 2000
    short, long = longest // 9, longest - 40
    # as many sequences, tokens and columns, so the same longest sequence and longest chunk; other
    # lengths, order and fill
    chunks = [
        ((long, 40), (3, 1), (0, 24), (short, 1)),
        ((short, 1), (0, 3), (longest - 1, 1), (7, 40)),
        ((0, 0), (longest - 1, 1), (5, 40), (0, 0)),
    ]
    decodes = [
        ((longest, 0), (1, 0), (short, 0), (17, 0)),
        ((16, 0), (0, 0), (longest, 0), (short + 5, 0)),
        ((0, 0), (longest, 0), (0, 0), (0, 0)),
    ]
    for window in (33,) if small else (None, 33):
        suffix = "" if window is None else f", window {window}"
        cases = [
            Case(lengths, window=window, padding=66 - sum(new for _, new in lengths), **shape)
            for lengths in chunks
        ]
        yield f"replay with other lengths, attention{suffix}", _replayed(cases, device)
        cases = [Case(lengths, window=window, decode=True, **shape) for lengths in decodes]
        yield f"replay with other lengths, decode{suffix}", _replayed(cases, device)


def _replayed(cases: list[Case], device: torch.device) -> Check:
    def check() -> dict[str, Any]:
        problems = [build_problem(case, device) for case in cases]
        names = [f.name for f in fields(Problem) if torch.is_tensor(getattr(problems[0], f.name))]
        names.remove("expected")
        tensors = {name: getattr(problems[0], name).clone() for name in names}
        static = replace(problems[0], **tensors)
        out = torch.empty_like(static.query)
        replay, no_graph = machine.capture(lambda: attend(static, cases[0], out=out), device)
        assert no_graph is None or not machine.has_graphs(device), no_graph
        for case, problem in zip([*cases, cases[0]], [*problems, problems[0]], strict=True):
            for name, tensor in tensors.items():
                assert tensor.shape == getattr(problem, name).shape, name
                tensor.copy_(getattr(problem, name))
            out.fill_(float("nan"))
            replay()
            machine.synchronize(device)
            try:
                assert_close(out, problem)
            except AssertionError as error:
                raise AssertionError(f"{case}: {error}") from None
        return {"graph": no_graph is None, "why not": no_graph, "replays": len(cases) + 1}

    return check
