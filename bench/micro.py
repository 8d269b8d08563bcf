"""Micro-benchmarks on the CPU: a step's host cost, attention, sampling, the set-up of a call.

    python -m bench.micro [--threads 1] [--out bench/results] [-k NAME]

The cases are those of tests/bench/test_micro.py, where the ordinary tests run each once. This
command times them with pytest-benchmark and keeps medians in one JSON file.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.lib.results import RESULTS, ROOT, describe, store

CASES = "tests/bench/test_micro.py"


def main() -> int:
    """Time the cases, print a line each, write the file; the exit code is that of pytest."""
    given = _parse()
    with tempfile.TemporaryDirectory() as folder:
        timed = Path(folder) / "timed.json"
        command = [sys.executable, "-m", "pytest", "-q", CASES, "--benchmark-enable"]
        command += ["--benchmark-only", "--benchmark-quiet", f"--benchmark-json={timed}"]
        command += ["-k", given.k] if given.k else []
        environment = os.environ | {"OMP_NUM_THREADS": str(given.threads)}
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        if done.returncode:
            return done.returncode
        cases = [_kept(case) for case in json.loads(timed.read_text())["benchmarks"]]
    for case in cases:
        print(f"{case['median_ms']:12.3f} ms  {case['name']}")
    facts = describe(torch.device("cpu")) | {"threads": given.threads}
    print(store("micro-cpu", {"kind": "micro", "cases": cases, "environment": facts}, given.out))
    return 0


def _kept(case: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of a case, out of pytest-benchmark's seconds."""
    stats, names = case["stats"], {"median": "median", "mean": "mean", "min": "least"}
    times = {f"{ours}_ms": round(1e3 * stats[theirs], 5) for theirs, ours in names.items()}
    return {"name": case["name"].removeprefix("test_"), **times, "rounds": stats["rounds"]}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("-k", help="only cases whose names match, as pytest's -k")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
