"""The measurement for accelerators, as far as it runs without one: its reduced form, its names.

What only an accelerator can run is thin, and its names are looked up here. Marked `gpu`: every
check of the measurement as a test of its own.
"""

import inspect
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from bench import gpu, gpu_table
from bench.accelerator import machine, tiles, timings
from bench.accelerator.contenders import CannotRun
from bench.accelerator.units import list_units
from tcb.kernels import paged_decode
from tcb.kernels.gpu import tuning

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_the_reduced_form_runs_from_end_to_end(tmp_path):
    done = run("bench.gpu", "--reduced", "--out", str(tmp_path), "--name", "reduced")
    content = json.loads((tmp_path / "reduced.json").read_text())
    assert content["failed"] == {"checks": {}, "timings": {}, "serving": {}}, done.stdout
    assert done.returncode == 0, done.stderr
    assert "nothing failed" in done.stdout
    for part in gpu.PARTS:
        assert {unit["state"] for unit in content[part].values()} == {"done"}
    assert len(content["checks"]) >= 20
    for unit in content["timings"].values():
        assert unit["record"]["contenders"]["tcb"]["us"] > 0
    for unit in content["serving"].values():
        speeds = {who: c["tokens_per_second"] for who, c in unit["record"]["contenders"].items()}
        assert len(speeds) == 4 and min(speeds.values()) > 0
    for name in ("tcb, shared list", "tcb, batch-invariant"):
        found = [u["record"]["contenders"].get(name, {}) for u in content["timings"].values()]
        assert any("us" in result for result in found), name
    assert content["environment"]["ceilings"]["read_bytes_per_second"] > 0


def test_tiles_are_timed_in_the_interpreter(tmp_path):
    done = run("bench.tune", "--reduced", "--dtypes", "float16", "--out", str(tmp_path))
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


# names of torch that only an accelerator would meet


def test_torch_has_the_names_that_are_used_on_accelerators():
    assert SDPBackend.CUDNN_ATTENTION.name == "CUDNN_ATTENTION"
    assert "enable_gqa" in (scaled_dot_product_attention.__doc__ or "")
    for module, graph in ((torch.cuda, "CUDAGraph"), (torch.xpu, "XPUGraph")):
        for name in ("mem_get_info", "empty_cache", "current_stream", "Stream", "stream", graph):
            assert hasattr(module, name), (module, name)
        first = list(inspect.signature(module.graph.__init__).parameters)[1]
        assert first in ("cuda_graph", "xpu_graph")
        assert hasattr(getattr(module, graph), "replay")
    for name in ("is_available", "current_accelerator", "synchronize"):
        assert hasattr(torch.accelerator, name)
    for name in ("record", "synchronize", "elapsed_time"):
        assert hasattr(torch.Event, name)


def test_triton_keeps_compiled_kernels_where_their_resources_are_read():
    code = f"""
import importlib, inspect
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction
text = inspect.getsource(JITFunction) + inspect.getsource(CompiledKernel)
assert all(name in text for name in ("self.device_caches", "self.n_regs", "self.n_spills"))
values = [v for name in {tiles.JIT_KERNELS} for v in vars(importlib.import_module(name)).values()]
names = {{value.__name__ for value in values if hasattr(value, "device_caches")}}
assert len(names) >= 2 and {tiles.DECODE_KERNEL!r} in names
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_cpu_answers_through_the_same_interface():
    ran = []
    replay, reason = machine.capture(lambda: ran.append(1), CPU)
    assert not ran and "no graphs" in reason
    assert machine.seconds(replay, 3, CPU) > 0
    with machine.side_stream(CPU, replay):
        ran.append(2)
    assert ran == [1, 1, 1, 2, 1]
    assert machine.free_memory(CPU) > 0


# the command


def write_lines(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def unit(name, state, part="checks", **more):
    return {"unit": f"{part}: {name}", "part": part, "name": name, "state": state, **more}


DYING = """
import os, sys
from pathlib import Path
from bench.accelerator import units
def unit(name):
    def run(seconds, keep):
        if name == "b":
            print("illegal access", flush=True)
            os.abort()
        return {"ran": name}
    return run
units.list_units = lambda part, device, small: [(name, unit(name)) for name in "abc"]
path = Path(sys.argv[1])
units.run("checks", (0, 1), path, float(sys.argv[2]), True, units.torch.device("cpu"))
"""


def test_a_unit_that_ends_its_process_is_recorded_and_the_rest_goes_on(tmp_path):
    record = tmp_path / "record.jsonl"
    lane = SimpleNamespace(
        command=lambda path: [sys.executable, "-c", DYING, str(path), "9e9"],
        parts=("checks",),
        end=9e9,
        reduced=False,
    )
    gpu.run_lane(lane, record)
    content = gpu.summary(gpu.read(record), ["checks"])
    assert {name: unit["state"] for name, unit in content["checks"].items()} == {
        "a": "done",
        "b": "failed",
        "c": "done",
    }
    assert content["checks"]["c"]["record"] == {"ran": "c"}
    assert list(content["failed"]["checks"]) == ["b"]
    assert "illegal access" in content["failed"]["checks"]["b"]
    assert content["exit_code"] == 1


@pytest.mark.parametrize("end", ["", "\n", '{"state": "do', '{"state": "do\n\n'])
def test_lines_that_are_blank_or_cut_off_are_left_out(tmp_path, end):
    path = tmp_path / "record.jsonl"
    assert gpu.read(path) == []
    write_lines(path, unit("a", "begun"))
    path.write_text("\n" + path.read_text() + end)
    assert gpu.read(path) == [unit("a", "begun")]
    # what is written next stands on a line of its own
    gpu.append(path, unit("b", "begun"))
    assert gpu.read(path) == [unit("a", "begun"), unit("b", "begun")]


def test_a_process_that_never_begins_is_a_failure(tmp_path):
    record = tmp_path / "record.jsonl"
    lane = SimpleNamespace(
        command=lambda path: [sys.executable, "-c", "raise SystemExit('no torch')"],
        parts=("timings",),
        end=9e9,
        reduced=False,
    )
    gpu.run_lane(lane, record)
    content = gpu.summary(gpu.read(record), ["timings"])
    assert content["exit_code"] == 2
    assert "no torch" in content["failed"]["timings"]["process"]


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([unit("a", "begun"), unit("a", "done", record={})], 0),
        ([unit("a", "begun"), unit("a", "failed", error="wrong")], 1),
        ([unit("a", "begun"), unit("a", "out of time")], 1),
        ([unit("a", "begun")], 1),
        ([], 1),
    ],
    ids=["done", "failed", "out of time", "begun", "nothing"],
)
def test_exit_codes_of_checks(lines, code):
    content = gpu.summary(lines, ["checks"])
    assert content["exit_code"] == code
    assert gpu_table.table(content | {"reduced": False})


def test_exit_code_of_a_comparison_that_differs():
    faults = {"faults": ["torch flash differs from tcb: 0.5"]}
    lines = [unit("x", "begun", "timings"), unit("x", "done", "timings", record=faults)]
    content = gpu.summary(lines, ["timings"])
    assert content["exit_code"] == 2 and "differs" in content["failed"]["timings"]["x"]


@pytest.mark.parametrize(
    ("result", "wrong"),
    [
        ({"difference": 0.001}, False),
        ({"difference": None}, False),
        ({"difference": 0.5}, True),
        ({"difference": "not finite"}, True),
    ],
    ids=str,
)
def test_a_comparator_that_differs_is_a_fault(result, wrong):
    record = {"contenders": {"tcb": {"us": 1.0}, "torch flash": result}}
    assert bool(timings.faults(record)) == wrong


def test_a_contender_of_ours_that_fails_is_a_fault_and_one_that_has_no_way_is_not():
    def attend(ours):
        return lambda: torch.ones(2)

    def fail(ours):
        raise RuntimeError("illegal access")

    def decline(ours):
        raise CannotRun("no chunks")

    prepared = {"tcb": attend, "tcb, a": fail, "tcb, b": decline, "other": fail, "more": attend}
    record = {"contenders": timings.race(prepared, [None, None], CPU, 1)}
    assert timings.faults(record) == ["tcb, a: RuntimeError: illegal access"]
    assert record["contenders"]["tcb, b"]["cannot"] == "no chunks"
    assert "us" in record["contenders"]["more"]
    alone = {"contenders": timings.race({"tcb": fail}, [None, None], CPU, 1)}
    assert timings.faults(alone) == ["tcb: RuntimeError: illegal access"]


# tiles


ALL_ROWS = [
    pytest.param(kind, tile, id=f"{name}-{kind}-{size}-{largest}")
    for name in ("sm_90", "sm_80", "sm_100", "sm_120", "gfx9", "gfx950", "other", "interpreter")
    for kind in ("wide", "narrow")
    for size in (2, 4)
    for largest, tile in tuning.list_rows(name, kind, size)
]


@pytest.mark.parametrize(("kind", "tile"), ALL_ROWS)
def test_a_tile_is_printed_as_what_makes_it_in_the_table(kind, tile):
    assert eval(tiles.described(kind, tile), vars(tuning)) == tile


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
    assert tiles.described(row[1], tile) == text


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
    kernels = compiled(tiles.DECODE_KERNEL, registers, shared), compiled("merge", 255, 200000)
    usages = [tiles.read_usage(kernel, name) for kernel in kernels]
    assert tiles.with_residency(tile, usages) == replace(tile, residency=resident)
    assert tiles.with_residency(tile, []) == tile


@pytest.mark.parametrize("is_row", [False, True])
def test_a_candidate_runs_with_its_residency_once_it_is_compiled(is_row, monkeypatch):
    known, asked = {}, []
    monkeypatch.setattr(tiles, "_kernels", lambda: dict(known))
    monkeypatch.setattr(tiles, "read_device", lambda *_: tuning.DeviceFacts("sm_90", 132))

    def call():
        asked.append(
            sys.modules[paged_decode.__module__].choose_tile("sm_90", "narrow", 2, 128, 4).residency
        )
        known[len(known)] = compiled(tiles.DECODE_KERNEL, 64, 50000)
        return torch.ones(1)

    candidate = tiles.Candidate(tuning.Tile(16, 64, 4, 3), is_row)
    run_it = tiles._with_tile(call, "narrow", candidate)
    for _ in range(3):
        run_it()
    assert asked == ([1, 1, 1] if is_row else [1, 4, 4])
    assert candidate.tile.residency == asked[-1]


# on an accelerator


def checks():
    if not torch.accelerator.is_available():
        return []
    return list(list_units("checks", machine.current_device(), False))


@pytest.mark.gpu
@pytest.mark.parametrize("check", [pytest.param(c, id=name) for name, c in checks()])
def test_check(check):
    check(0.0, lambda record: None)
