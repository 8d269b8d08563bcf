"""The timed workloads against fp64 in some sequences, and again and again for the same bits."""

import torch

from bench.lib import attention, contenders, machine
from bench.lib.attention import Tensors, Workload
from tests.gpu.checking import need, sized
from tests.support import oracle
from tests.support.oracle import Case


@sized(
    "workload",
    [(workload,) for workload in attention.choose(small=False)],
    [(workload,) for workload in attention.choose(small=True)],
)
def test_every_run_gives_the_same_right_bits(workload, small, device, saw):
    need(2 * attention.needed_bytes(workload), device)
    tensors = attention.build(workload, device, seed=3)
    call = contenders.tcb(workload, tensors)
    result = call()
    out = result.clone()
    last, repeats = len(workload.sequences) - 1, 2 if small else 20
    rows = sorted({0, last // 2, last})
    errors = [error_of(workload, tensors, out, row) for row in rows]
    # other work on the device changes who runs when
    noise = torch.randn(1024 if device.type != "cpu" else 16, 1024, device=device)
    for turn in range(repeats):
        result.fill_(float("nan"))
        with machine.side_stream(device, call):
            for _ in range(turn):
                torch.mm(noise, noise.T)
        assert torch.equal(result, out), f"run {turn + 2} of the same call gave other bits"
    saw(errors=errors, runs=repeats + 1)


def error_of(workload: Workload, tensors: Tensors, out: torch.Tensor, row: int) -> float:
    """Hold one sequence and the last group of heads to the oracle."""
    group = workload.heads // workload.kv_heads
    rows = slice(*tensors.query_start[row : row + 2].tolist())
    kept = slice(*tensors.key_start[row : row + 2].tolist())
    query = tensors.query[rows, -group:]
    keys, values = tensors.keys[kept, -1:], tensors.values[kept, -1:]
    case = Case((), dtype=query.dtype, window=workload.window)
    exact = oracle.attend(query, keys, values, case, None, torch.float64)
    rounded = oracle.attend(query, keys, values, case, None, query.dtype)
    magnitude = oracle.attend(query, keys, values.abs(), case, None, torch.float64)
    largest = oracle.score(query, keys, case, torch.float64).abs().max().item()
    allowed = oracle.tolerance(case, exact, rounded, magnitude, largest)
    got = out[rows, -group:]
    assert torch.isfinite(got).all(), f"sequence {row} is not finite"
    error = (got.double() - exact).abs().max().item()
    assert error <= allowed, f"sequence {row}: error {error:.3g} > {allowed:.3g}"
    return error
