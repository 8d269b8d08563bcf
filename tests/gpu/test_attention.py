"""Attention on the device against dense fp64: few kernels to compile, many lengths through each."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from bench.lib import machine
from tests.gpu.checking import BRAIN, FULL, HALF, attend, poisoned, sized
from tests.support.oracle import Case, Problem, assert_close, build

# lengths that have bitten: single tokens, edges of pages and tiles, empty ones, one long chunk
CHUNKS = ((0, 1), (2, 1), (1327, 1), (63, 1), (64, 1), (65, 1), (0, 2), (796, 3), (13, 5), (0, 17))
CHUNKS += ((0, 0), (7, 0), (90, 113), (334, 129), (2, 511), (1529, 640))
LENGTHS = (1, 2, 15, 16, 17, 0, 63, 64, 65, 255, 256, 257, 1328, 2011, 0, 4096)
INF = float("inf")


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
# every family in bf16 and fp16, the first ones in fp32 too
ALL = [(family, dtype) for family in FAMILIES for dtype in (BRAIN, HALF)]
ALL += [(family, FULL) for family in FAMILIES[:3]]
FEW = [(family, BRAIN) for family in FAMILIES[1:3]]


@sized("family dtype", ALL, FEW)
def test_attention(family, dtype, small, device, saw):
    case = replace(family.case, dtype=dtype, sequences=CHUNKS, padding=5)
    if small:
        held_to_oracle(replace(case, sequences=((65, 1), (13, 40), (0, 0)), **tiny(case)), device)
        return
    cases = [case, replace(case, magnitude=300.0)]
    if case.sinks is not None:
        cases.append(replace(case, sinks=-INF))
    saw(cases=[held_to_oracle(case, device) for case in cases])


@sized("family dtype", ALL, FEW)
def test_decode(family, dtype, small, device, saw):
    lengths = (65, 0, 130) if small else LENGTHS
    case = replace(family.case, dtype=dtype, sequences=tuple((n, 0) for n in lengths), decode=True)
    case = replace(case, **tiny(case)) if small else case
    cases = [replace(case, num_splits=count) for count in ((None, 3) if small else (None, 1, 3))]
    saw(cases=[held_to_oracle(case, device) for case in cases])


def tiny(case: Case) -> dict[str, int]:
    """The sizes that the interpreter runs in a second."""
    return {"heads": 4, "kv_heads": 2, "dim": 16, "page_size": min(case.page_size, 16)}


def held_to_oracle(case: Case, device: torch.device) -> dict[str, Any]:
    """The error of a case, which is within its tolerance; a second call gives the same bits."""
    problem = build(case, device)
    out, again = (attend(problem, case, out=poisoned(problem, case)) for _ in range(2))
    machine.synchronize(device)
    assert_close(out, problem)
    rows = len(problem.expected)
    assert torch.equal(again[:rows], out[:rows]), "the same call gave other bits"
    error = (out[:rows].double() - problem.expected).abs().max().item() if out[:rows].numel() else 0
    return {"case": str(case)[-80:], "error": error, "tolerance": problem.tolerance}


def replayed_lengths(decode: bool, longest: int) -> list[tuple[tuple[int, int], ...]]:
    """As many sequences, tokens and columns, so the same longest sequence and longest chunk; other
    lengths, order and fill.
    """
    short, long = longest // 9, longest - 40
    if decode:
        lengths = ((longest, 1, short, 17), (16, 0, longest, short + 5), (0, longest, 0, 0))
        return [tuple((length, 0) for length in row) for row in lengths]
    return [
        ((long, 40), (3, 1), (0, 24), (short, 1)),
        ((short, 1), (0, 3), (longest - 1, 1), (7, 40)),
        ((0, 0), (longest - 1, 1), (5, 40), (0, 0)),
    ]


KINDS = {"attention": False, "decode": True}


@sized("kind window", [(k, w) for k in KINDS for w in (None, 33)], [(k, 33) for k in KINDS])
def test_a_captured_call_is_replayed_with_other_lengths(kind, window, small, device, saw):
    shape = {"heads": 4, "kv_heads": 2, "dim": 16 if small else 128, "page_size": 16}
    shape |= {"dtype": HALF if small else BRAIN, "window": window, "decode": KINDS[kind]}
    rows = replayed_lengths(KINDS[kind], 90 if small else 2000)
    # padded to the same number of tokens
    padding = [0 if KINDS[kind] else 66 - sum(new for _, new in row) for row in rows]
    cases = [Case(row, padding=pad, **shape) for row, pad in zip(rows, padding, strict=True)]
    problems = [build(case, device) for case in cases]
    names = [f.name for f in fields(Problem) if torch.is_tensor(getattr(problems[0], f.name))]
    names.remove("expected")
    tensors = {name: getattr(problems[0], name).clone() for name in names}
    static, out = replace(problems[0], **tensors), torch.empty_like(problems[0].query)
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
    saw(graph=no_graph is None, why_not=no_graph, replays=len(cases) + 1)
