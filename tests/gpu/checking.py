"""The two sizes of a check, and attention called as a case of the oracle says."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from bench.lib import machine
from tcb.kernels import paged_attention, paged_decode
from tests.support.oracle import Case, Problem

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
_GIB = 2**30


def sized(
    names: str, full: Iterable[tuple[Any, ...]], reduced: Iterable[tuple[Any, ...]]
) -> pytest.MarkDecorator:
    """Parametrize a check by `names` and `small`: full cases for an accelerator, reduced ones."""
    cases = [
        pytest.param(*row, False, id="-".join([*map(_shown, row), "full"]), marks=pytest.mark.gpu)
        for row in full
    ]
    cases += [
        pytest.param(*row, True, id="-".join([*map(_shown, row), "reduced"])) for row in reduced
    ]
    return pytest.mark.parametrize([*names.split(), "small"], cases)


def _shown(value: Any) -> str:
    return str(getattr(value, "name", value)).removeprefix("torch.")


def attend(problem: Problem, case: Case, **options: Any) -> torch.Tensor:
    """The operation that a case is for."""
    options |= {
        "window": case.window,
        "softcap": case.softcap,
        "sinks": problem.sinks,
        "scale": case.scale,
    }
    if not case.decode:
        return paged_attention(*problem.chunks, **options)
    if case.num_splits is not None:
        options["num_splits"] = case.num_splits
    pages = problem.key_cache, problem.value_cache, problem.block_table, problem.context_len
    return paged_decode(problem.query, *pages, **options)


def poisoned(problem: Problem, case: Case) -> torch.Tensor:
    """An output full of NaN: what is not written shows."""
    tokens, heads, _ = problem.query.shape
    return problem.query.new_full((tokens, heads, problem.value_cache.shape[3]), float("nan"))


def need(size: float, device: torch.device) -> None:
    """Skip a check of `size` bytes for which the device has no room."""
    if device.type != "cpu" and size > 0.9 * machine.free_memory(device):
        pytest.skip(f"{size / _GIB:.0f} GiB do not fit the free memory")
