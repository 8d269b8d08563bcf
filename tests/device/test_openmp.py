"""OpenMP's workers sleep soon after a step, whatever the environment of the process is."""

import os
import subprocess
import sys

import pytest
import torch

from tcb.device import openmp

# milliseconds of processor time that a process burns while it sleeps after a parallel operation
BURNED = """
import threading, time, torch
from tcb.device.mode import plain_mode
CALM
rows = torch.zeros(2**18)
spent = 0.0
for _ in range(30):
    rows.add_(1)
    start = time.process_time()
    time.sleep(0.01)
    spent += time.process_time() - start
print(spent / 30 * 1e3, sum(t.name == "tcb-idle-team" for t in threading.enumerate()))
"""
CALM = """
for _ in range(3):
    with plain_mode(torch.device("cpu")):
        pass
"""


def burned(program: str) -> tuple[float, int]:
    processors = openmp._processors()
    environment = {name: value for name, value in os.environ.items() if "OMP" not in name}
    environment["OMP_NUM_THREADS"] = str(processors)
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    milliseconds, teams = result.stdout.split()
    return float(milliseconds), int(teams)


@pytest.mark.skipif(openmp._processors() < 2, reason="one processor: nobody waits for another")
def test_workers_do_not_spin_behind_a_step():
    spinning, no_team = burned(BURNED.replace("CALM", ""))
    calm, teams = burned(BURNED.replace("CALM", CALM))
    assert (no_team, teams) == (0, 1)
    # libgomp spins for milliseconds; where another OpenMP is loaded there is nothing to calm
    assert calm < 0.6 or spinning < 0.6, (calm, spinning)


@pytest.mark.parametrize(
    ("threads", "processors", "teams"), [(1, 1, 0), (1, 2, 0), (2, 2, 1), (3, 4, 1), (2, 4, 0)]
)
def test_a_team_is_made_where_most_processors_are_used(threads, processors, teams, monkeypatch):
    started = []

    class Thread(openmp.threading.Thread):
        def start(self):
            started.append(self.name)
            self._args[0].set()

    monkeypatch.setattr(openmp, "_made", set())
    monkeypatch.setattr(openmp, "_processors", lambda: processors)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(openmp.threading, "Thread", Thread)
    for _ in range(2):
        openmp.calm_workers()
    assert len(started) == teams
