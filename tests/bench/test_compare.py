"""Two trees are compared in turns: the same work in both, also in a tree of older names."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from bench import compare
from bench.lib import worker
from bench.lib.results import ROOT


def test_steps_of_two_trees_are_compared(tmp_path):
    command = [sys.executable, "-m", "bench.compare", "--base", str(ROOT), "--rounds", "2"]
    command += ["--what", "host", "--sequences", "4", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "compare.json").read_text())
    step = content["host"]["4 sequences"]
    assert step["ratio"] > 0
    for name in ("base", "new"):
        assert len(step["each_ms"][name]) == 2 and min(step["each_ms"][name]) > 0
        assert content[name]["commit"] == content["environment"]["commit"]


@pytest.mark.parametrize("same", [True, False])
def test_serving_of_two_trees_is_compared(same):
    def base(what, **job):
        answer = worker.serve(**job)
        return answer | {"seconds": 2.0} | ({} if same else {"hash": "other"})

    def new(what, **job):
        return worker.serve(**job) | {"seconds": 1.0}

    given = SimpleNamespace(requests=3, new_tokens=2, threads=torch.get_num_threads(), rounds=2)
    asks = {"base": base, "new": new}
    found = compare.compare_serving(asks, "random-llama-tiny", "chat", given)
    assert found["ratio"] == 2.0 and found["tokens_equal"] == same
    assert found["base"] == {"tokens_per_second": 3.0, "seconds": [2.0, 2.0]}
    assert found["new"]["tokens_per_second"] == 6.0


def test_names_of_older_trees_are_known(tmp_path):
    planning = tmp_path / "tcb" / "planning"
    planning.mkdir(parents=True)
    for folder in (planning, planning.parent):
        (folder / "__init__.py").touch()
    (planning / "config.py").write_text("Limits = 'the limits'")
    (planning / "state.py").write_text("Results = 'the results'")
    code = (
        "import sys; from pathlib import Path; from bench.lib import worker\n"
        "worker.use_package(Path(sys.argv[1]))\n"
        "from tcb.planning.limits import Limits\nfrom tcb.planning.state import SampledTokens\n"
        "assert (Limits, SampledTokens) == ('the limits', 'the results')"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True)


def test_every_round_begins_with_the_other_tree():
    asked = []
    asks = {name: lambda name=name: asked.append(name) or {} for name in ("base", "new")}
    answers = compare.take_turns(asks, 3)
    assert asked == ["base", "new", "new", "base", "base", "new"]
    assert {name: len(rows) for name, rows in answers.items()} == {"base": 3, "new": 3}


def test_a_revision_is_written_out_and_an_unknown_one_refused():
    if not (ROOT / ".git").exists():
        pytest.skip("no repository")
    with compare.source_tree("HEAD") as tree:
        assert (tree / "tcb" / "__init__.py").is_file()
    assert not tree.exists()
    with (
        pytest.raises(SystemExit, match="no-such-revision"),
        compare.source_tree("no-such-revision"),
    ):
        pass
