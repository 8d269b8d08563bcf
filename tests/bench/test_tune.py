"""Candidate tiles are timed, printed as the table writes them, and run with their residency."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bench import tune
from bench.lib.results import ROOT
from tcb.kernels.gpu import paged_decode as gpu_decode
from tcb.kernels.gpu import tuning


def test_tiles_are_timed_in_the_interpreter(tmp_path):
    command = [sys.executable, "-m", "bench.tune", "--reduced", "--dtypes", "float16"]
    command += ["--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("tiles-reduced-*.json")
    groups = json.loads(path.read_text())["groups"]
    assert [group["kind"] for group in groups] == ["wide", "narrow"]
    for group in groups:
        assert group["best"] in group["tiles"]
        assert len(group["tiles"]) >= 2
        form = r"_wide\([\d, ]+\)" if group["kind"] == "wide" else r"_narrow\([\d, ]+residency=\d\)"
        assert all(re.fullmatch(form, tile) for tile in group["tiles"])
        # the forced tiles were used, and give the results of the table's
        for result in group["tiles"].values():
            assert result["us"] > 0 and not result["resources"]
        assert group["tiles"][group["present"]]["difference"] is None


def test_triton_keeps_compiled_kernels_where_their_resources_are_read():
    code = f"""
import importlib, inspect
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction
text = inspect.getsource(JITFunction) + inspect.getsource(CompiledKernel)
assert all(name in text for name in ("self.device_caches", "self.n_regs", "self.n_spills"))
values = [v for name in {tune.JIT_KERNELS} for v in vars(importlib.import_module(name)).values()]
names = {{value.__name__ for value in values if hasattr(value, "device_caches")}}
assert len(names) >= 2 and {tune.DECODE_KERNEL!r} in names
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


ALL_ROWS = [
    pytest.param(kind, tile, id=f"{name}-{kind}-{size}-{largest}")
    for name in ("sm_90", "sm_80", "sm_100", "sm_120", "gfx9", "gfx950", "other", "interpreter")
    for kind in ("wide", "narrow")
    for size in (2, 4)
    for largest, tile in tuning.list_rows(name, kind, size)
]


@pytest.mark.parametrize(("kind", "tile"), ALL_ROWS)
def test_a_tile_is_printed_as_what_makes_it_in_the_table(kind, tile):
    assert eval(tune.described(kind, tile), vars(tuning)) == tile


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (("sm_90", "wide", 2), "_wide(128, 64, 8, 3)"),
        (("gfx9", "wide", 2), "_wide(128, 32, 8, 2, matrix_instr_nonkdim=16)"),
        (("sm_80", "narrow", 2), "_narrow(16, 64, 4, 3, residency=2)"),
        (("sm_90", "wide", 4), "Tile(32, 32, 8, 2)"),
    ],
    ids=str,
)
def test_the_forms_of_printed_tiles(row, text):
    tile = dict(tuning.list_rows(*row))[128]
    assert tune.described(row[1], tile) == text


def compiled(kernel, registers, shared):
    metadata = SimpleNamespace(name=kernel, shared=shared, num_warps=4, warp_size=32)
    return SimpleNamespace(metadata=metadata, n_regs=registers, n_spills=0)


@pytest.mark.parametrize(
    ("name", "registers", "shared", "resident"),
    # 65,536 registers a processor for 128 threads each, or 228 KiB with 1 KiB more a program
    [
        ("sm_90", 128, 1000, 4),
        ("sm_90", 64, 70000, 3),
        ("sm_80", 64, 70000, 2),
        ("other", 64, 70000, 1),
    ],
)
def test_a_candidate_has_the_residency_that_its_compiled_decode_has(
    name, registers, shared, resident
):
    tile = tuning.Tile(16, 64, 4, 3)
    # the merge takes less, and does not count
    kernels = compiled(tune.DECODE_KERNEL, registers, shared), compiled("merge", 255, 200000)
    usages = [tune.read_usage(kernel, name) for kernel in kernels]
    assert tune.with_residency(tile, usages) == replace(tile, residency=resident)
    assert tune.with_residency(tile, []) == tile


@pytest.mark.parametrize("is_row", [False, True])
def test_a_candidate_runs_with_its_residency_once_it_is_compiled(is_row, monkeypatch):
    known, asked = {}, []
    monkeypatch.setattr(tune, "_kernels", lambda: dict(known))
    monkeypatch.setattr(tune, "read_device", lambda *_: tuning.DeviceFacts("sm_90", 132))

    def call():
        asked.append(gpu_decode.choose_tile("sm_90", "narrow", 2, 128, 4).residency)
        known[len(known)] = compiled(tune.DECODE_KERNEL, 64, 50000)
        return torch.ones(1)

    candidate = tune.Candidate(tuning.Tile(16, 64, 4, 3), is_row)
    run_it = tune._with_tile(call, "narrow", candidate)
    for _ in range(3):
        run_it()
    assert asked == ([1, 1, 1] if is_row else [1, 4, 4])
    assert candidate.tile.residency == asked[-1]
