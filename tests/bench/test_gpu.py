"""`bench.gpu` from end to end in its reduced form, and behind units that end their process."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from bench import gpu, kernels
from bench.lib import gpu_table
from bench.lib.contenders import CannotRun
from bench.lib.records import append, read
from bench.lib.results import ROOT

CPU = torch.device("cpu")


def measure_reduced(folder, *arguments, **environment):
    """The JSON content of one reduced run, in which nothing failed."""
    command = [sys.executable, "-m", "bench.gpu", "--reduced", "--out", str(folder)]
    done = subprocess.run(
        [*command, "--name", "reduced", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    content = json.loads((folder / "reduced.json").read_text())
    assert not any(content["failed"].values()), done.stdout
    assert done.returncode == 0, done.stderr
    assert "nothing failed" in done.stdout
    for part in content["failed"]:
        assert {unit["state"] for unit in content[part].values()} == {"done"}
    assert content["environment"]["device"]
    return content


def test_checks_are_recorded(tmp_path):
    # the others run as tests of their own
    content = measure_reduced(
        tmp_path,
        "--parts",
        "checks",
        PYTEST_ADDOPTS="-k far_pools --ignore tests/gpu/test_engine.py",
    )
    names = [name for name in content["checks"] if name.startswith("far_pools.py::")]
    assert len(names) == len(content["checks"]) >= 4
    assert all(unit["record"]["elements"] >= 2**17 for unit in content["checks"].values())


def test_kernels_are_timed(tmp_path):
    content = measure_reduced(tmp_path, "--parts", "timings")
    for unit in content["timings"].values():
        assert unit["record"]["contenders"]["tcb"]["us"] > 0
    for name in ("tcb, shared list", "tcb, batch-invariant"):
        found = [u["record"]["contenders"].get(name, {}) for u in content["timings"].values()]
        assert any("us" in result for result in found), name
    assert content["environment"]["ceilings"]["read_bytes_per_second"] > 0


def test_serving_is_timed(tmp_path):
    content = measure_reduced(tmp_path, "--parts", "serving")
    for unit in content["serving"].values():
        speeds = {who: c["tokens_per_second"] for who, c in unit["record"]["contenders"].items()}
        assert len(speeds) == 4 and min(speeds.values()) > 0


def write_lines(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def unit(name, state, part="checks", **more):
    return {"unit": f"{part}: {name}", "part": part, "name": name, "state": state, **more}


def run_lane(record, part, *command, end=9e9):
    """What a lane of the command `python -m command --record ... --end ...` leaves behind."""
    options = ["--record", str(record), "--end", str(end)]
    lane = SimpleNamespace(
        command=lambda path: [sys.executable, *command, *options],
        part=part,
        end=9e9,
        reduced=False,
    )
    gpu.run_lane(lane, record)
    return gpu.summary(read(record), [part])


DYING_UNITS = """
import os, sys, types
from bench.lib import units
def unit(name):
    def run(seconds, keep):
        if name == "b":
            print("illegal access", flush=True)
            os.abort()
        return {"ran": name}
    return run
sys.modules["bench.kernels"] = types.ModuleType("bench.kernels")
sys.modules["bench.kernels"].units = lambda device, small: [(name, unit(name)) for name in "abc"]
units.main()
"""
DYING_TESTS = """
import os
import pytest
@pytest.mark.parametrize("name", "abc")
def test(name, record_property):
    if name == "b":
        print("illegal access", flush=True)
        os.abort()
    record_property("ran", name)
"""


@pytest.mark.parametrize("part", ["checks", "timings"])
def test_a_unit_that_ends_its_process_is_recorded_and_the_rest_goes_on(part, tmp_path):
    tests = tmp_path / "test_dying.py"
    tests.write_text(DYING_TESTS)
    checks = *gpu.PYTEST, str(tests)
    command = checks if part == "checks" else ("-c", DYING_UNITS, part, "--reduced")
    content = run_lane(tmp_path / "record.jsonl", part, *command)
    units = {name.split("[")[-1].strip("]"): unit for name, unit in content[part].items()}
    states = {name: unit["state"] for name, unit in units.items()}
    assert states == {"a": "done", "b": "failed", "c": "done"}
    assert units["c"]["record"].items() >= {"ran": "c"}.items()
    (error,) = content["failed"][part].values()
    assert "illegal access" in error
    assert content["exit_code"] == (1 if part == "checks" else 2)


def test_processes_share_the_checks_and_record_what_becomes_of_each(tmp_path):
    tests, path = tmp_path / "test_checks.py", tmp_path / "record.jsonl"
    tests.write_text(
        "import pytest\n@pytest.mark.parametrize('n', range(5))\ndef test(n):\n"
        "    assert n != 1, 'wrong'\n    if n == 3: pytest.skip('no room')\n"
    )
    content = run_lane(path, "checks", *gpu.PYTEST, "--share", "1", "2", str(tests))
    failed, skipped = content["checks"].values()
    assert (failed["state"], skipped["state"]) == ("failed", "done")
    assert "wrong" in failed["error"] and skipped["record"] == {"skipped": "no room"}
    assert content["exit_code"] == 1 and len(content["failed"]["checks"]) == 1
    # the other process begins when the time is over
    content = run_lane(path, "checks", *gpu.PYTEST, str(tests), end=0)
    states = [unit["state"] for unit in content["checks"].values()]
    assert states == ["failed", "done", "out of time", "out of time", "out of time"]


@pytest.mark.parametrize("end", ["", "\n", '{"state": "do', '{"state": "do\n\n'])
def test_lines_that_are_blank_or_cut_off_are_left_out(tmp_path, end):
    path = tmp_path / "record.jsonl"
    assert read(path) == []
    write_lines(path, unit("a", "begun"))
    path.write_text("\n" + path.read_text() + end)
    assert read(path) == [unit("a", "begun")]
    # what is written next stands on a line of its own
    append(path, unit("b", "begun"))
    assert read(path) == [unit("a", "begun"), unit("b", "begun")]


def test_a_process_that_never_begins_is_a_failure(tmp_path):
    code = "raise SystemExit('no torch')"
    content = run_lane(tmp_path / "record.jsonl", "timings", "-c", code)
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
    assert bool(kernels.faults(record)) == wrong


def test_a_contender_of_ours_that_fails_is_a_fault_and_one_that_has_no_way_is_not():
    def attend(ours):
        return lambda: torch.ones(2)

    def fail(ours):
        raise RuntimeError("illegal access")

    def decline(ours):
        raise CannotRun("no chunks")

    prepared = {"tcb": attend, "tcb, a": fail, "tcb, b": decline, "other": fail, "more": attend}
    record = {"contenders": kernels.race(prepared, [None, None], CPU, 1)}
    assert kernels.faults(record) == ["tcb, a: RuntimeError: illegal access"]
    assert record["contenders"]["tcb, b"]["cannot"] == "no chunks"
    assert "us" in record["contenders"]["more"]
    alone = {"contenders": kernels.race({"tcb": fail}, [None, None], CPU, 1)}
    assert kernels.faults(alone) == ["tcb: RuntimeError: illegal access"]
