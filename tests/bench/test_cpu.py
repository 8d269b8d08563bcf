"""The table of a CPU asks all systems for the same, and what it starts beside them ends."""

import argparse
import os
import sys

import pytest
import torch

from bench import cpu
from bench.busy import busy_processes
from bench.lib import vllm_process
from bench.lib.systems import System
from bench.lib.vllm_process import vllm
from bench.models import open_model

WORKER = """
import json, os, sys
print(json.dumps({"threads": os.environ["OMP_NUM_THREADS"]}), flush=True)
if "broken" in sys.argv[1]:
    sys.exit("no such model")
for line in sys.stdin:
    job = json.loads(line)
    tokens = [[len(prompt)] * job["new_tokens"] for prompt in job["prompts"]]
    print(json.dumps({"seconds": 0.1, "tokens": tokens}), flush=True)
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    monkeypatch.setattr(vllm_process, "_WORKER", path)


def test_vllm_is_asked_for_token_ids_and_a_number_of_tokens(worker, tmp_path):
    with vllm(sys.executable, tmp_path / "model", "float32", 1) as system:
        assert isinstance(system, System)
        assert system.run(None, [[1, 2, 3], [4]], 2, {}) == [[3, 3], [1, 1]]
        assert system.run(None, [[1]], 1, {}) == [[1]]


def test_vllm_that_ends_is_an_error_with_its_reason(worker, tmp_path):
    with (
        vllm(sys.executable, tmp_path / "broken", "float32", 1) as system,
        pytest.raises((RuntimeError, BrokenPipeError)),
    ):
        for _ in range(2):
            system.run(None, [[1]], 1, {})


def test_busy_processes_run_and_end():
    with busy_processes(2) as processes:
        assert [process.poll() for process in processes] == [None, None]
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


def test_a_row_has_a_speed_of_every_system(worker, tmp_path):
    model, _ = open_model("random-llama-tiny", torch.float32, "cpu")
    arguments = argparse.Namespace(new_tokens=2, rounds=2)
    prompts = [[1, 2, 3], [4, 5]]
    asked = []

    def run(model, prompts, new_tokens, settings):
        asked.append(settings)
        return [[0] * new_tokens for _ in prompts]

    fake = System(run, lambda *job: {})
    row = cpu.measure({"tcb": fake, "transformers-cb": fake}, model, prompts, arguments, 60)
    assert set(row["tokens_per_second"]) == {"tcb", "transformers-cb", "bare"}
    assert {len(seconds) for seconds in row["seconds"].values()} == {2}
    assert {"num_blocks"} < set(row["settings"]["transformers-cb"]) and {} in asked
    short = cpu.measure({"tcb": fake, "transformers-cb": fake}, model, prompts, arguments, 0)
    assert {len(seconds) for seconds in short["seconds"].values()} == {1}
    assert "tcb" in cpu.line({"dtype": "float32", "requests": 2, "prompt_tokens": 5} | row)
