"""The measurement for accelerators, as far as it runs without one: its reduced form, its names.

What only an accelerator can run is thin, and its names are looked up here. Marked `gpu`: every
check of the measurement as a test of its own.
"""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from bench import gpu, gpu_table
from bench.accelerator import machine, tiles, timings
from bench.accelerator.units import list_units

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
assert sum(hasattr(value, "device_caches") for value in values) >= 2
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
import json, os, sys
def read():
    return [json.loads(line) for line in open(path) if line.strip()]
def write(name, state):
    line = {"unit": "checks: " + name, "part": "checks", "name": name, "state": state}
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\\n")
path = sys.argv[1]
begun = {line["name"] for line in read()} if os.path.exists(path) else set()
for name in "abc":
    if name not in begun:
        write(name, "begun")
        if name == "b":
            print("illegal access", flush=True)
            os.abort()
        write(name, "done")
"""


def test_a_unit_that_ends_its_process_is_recorded_and_the_rest_goes_on(tmp_path):
    record, program = tmp_path / "record.jsonl", tmp_path / "dying.py"
    program.write_text(DYING)
    lane = SimpleNamespace(
        command=lambda path: [sys.executable, str(program), str(path)],
        parts=("checks",),
        end=9e9,
        reduced=False,
    )
    gpu.run_lane(lane, record)
    lines = [line | {"record": {}} for line in gpu.read(record)]
    content = gpu.summary(lines, ["checks"])
    assert [content["checks"][name]["state"] for name in "abc"] == ["done", "failed", "done"]
    assert "illegal access" in content["failed"]["checks"]["b"]
    assert content["exit_code"] == 1


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


def test_an_attention_that_does_not_run_is_a_fault():
    assert timings.faults({"contenders": {"tcb": {"cannot": "illegal access"}}})


# on an accelerator


def checks():
    if not torch.accelerator.is_available():
        return []
    return list(list_units("checks", machine.current_device(), False))


@pytest.mark.gpu
@pytest.mark.parametrize("check", [pytest.param(c, id=name) for name, c in checks()])
def test_check(check):
    check(0.0, lambda record: None)
