"""Measure the package on the accelerator of this machine: right, fast beside others, serving.

One command in three parts: the checks of tests/gpu, timings beside torch, cuDNN, FlashAttention-3
and the floors, and serving beside transformers. Parts run in processes of their own, so what takes
one down is recorded and the rest goes on. Writes one JSON file and prints a table; exits with 1 if
a check failed, with 2 if anything else did. `--reduced` runs all of it, tiny, in Triton's
interpreter. This process starts and collects; it loads neither torch nor Triton.
"""

import argparse
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.lib import gpu_table
from bench.lib.records import Record, append, read

ROOT = Path(__file__).resolve().parent.parent
RESULTS, SCRATCH = ROOT / "bench" / "results", ROOT / "build"
PARTS = ("checks", "timings", "serving")
# what a test prints stays in sight if it ends the process
PYTEST = ("-m", "pytest", "-q", "-s", "-p", "no:faulthandler", "-p", "no:cacheprovider")
PYTEST += ("-p", "bench.lib.recording")
# of the minutes given, what each part may have used when it ends
_ENDS = {"checks": 0.40, "timings": 0.65, "serving": 1.0}
# processes that check at once: most of their time is spent compiling, on one thread each
_MOST_CHECKERS = 8
# after its end a process may finish what it is at
_GRACE = 20.0
# what a process takes at most to load everything and name its units
_START = 60.0


@dataclass(frozen=True, slots=True)
class Lane:
    """A part that one process runs, its share of the units, and when it should end."""

    part: str
    share: tuple[int, int]
    end: float
    reduced: bool

    def command(self, record: Path) -> list[str]:
        """The command of the process."""
        if self.part == "checks":
            marked = "not gpu" if self.reduced else "gpu"
            command = [*PYTEST, "-m", marked, "--share", *map(str, self.share), "tests/gpu"]
        else:
            command = ["-m", "bench.lib.units", self.part, *["--reduced"] * self.reduced]
        return [sys.executable, *command, "--record", str(record), "--end", str(self.end)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, print the table, write the JSON file and return the exit code."""
    given = _parse(arguments)
    start = time.time()
    with tempfile.TemporaryDirectory() as folder:
        lines = run_parts(given.parts, given.minutes * 60, given.reduced, Path(folder))
    content = summary(lines, given.parts)
    content |= {"reduced": given.reduced, "seconds": round(time.time() - start, 1)}
    print(gpu_table.table(content))
    folder = given.out or (SCRATCH if given.reduced else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{given.name or _name(content)}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(path)
    return content["exit_code"]


def run_parts(parts: list[str], seconds: float, reduced: bool, folder: Path) -> list[Record]:
    """The lines that all processes recorded, part after part; shares of one part run together."""
    start, lines = time.time(), []
    checkers = 1 if reduced else max(1, min(_MOST_CHECKERS, (os.cpu_count() or 1) // 2))
    for part in parts:
        number, end = checkers if part == "checks" else 1, start + _ENDS[part] * seconds
        beside = [Lane(part, (share, number), end, reduced) for share in range(number)]
        paths = [folder / f"{part}-{share}.jsonl" for share in range(number)]
        pairs = zip(beside, paths, strict=True)
        threads = [threading.Thread(target=run_lane, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        lines += itertools.chain.from_iterable(map(read, paths))
    return lines


def run_lane(lane: Lane, record: Path) -> None:
    """Start a lane's process, and again behind each unit that ended it. Appends to the file.

    Past its end a process only records what it has no time for.
    """
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if lane.reduced:
        environment |= {"TRITON_INTERPRET": "1"}
    while True:
        before = len(read(record))
        code, said = _wait(lane.command(record), environment, lane.end + _GRACE - time.time())
        lines = read(record)
        last = lines[-1] if lines else {"state": "none"}
        if code == 0:
            return
        shared = {key: last[key] for key in ("unit", "part", "name") if key in last}
        if last["state"] in ("begun", "partial"):
            error = f"the process ended with {code}: {said[-1500:]}"
            append(record, {**shared, "state": "failed", "error": error})
        progressed = any(line["state"] == "begun" for line in lines[before:])
        if not progressed:
            error = f"the process ended with {code} between units: {said[-1500:]}"
            line = {"unit": f"{lane.part}: process", "part": lane.part, "name": "process"}
            append(record, {**line, "state": "failed", "error": error})
            return


def _wait(command: list[str], environment: dict[str, str], seconds: float) -> tuple[int, str]:
    """Exit code of a process and the end of what it said; it is ended when its time is over."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=said, stderr=said, start_new_session=True
        )
        try:
            code = process.wait(max(_START, seconds))
        except subprocess.TimeoutExpired:
            # compilers that it started too: they share its group
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        said.seek(0)
        return code, said.read()[-4000:]


def summary(lines: list[Record], parts: list[str]) -> Record:
    """One record of each unit by part, the facts of the machine, and what failed."""
    facts: Record = {}
    units: dict[str, dict[str, Record]] = {part: {} for part in parts}
    for line in lines:
        if line["state"] == "facts":
            facts |= line["record"]
        else:
            kept = units[line["part"]].setdefault(line["name"], {})
            # a partial record stays if the unit ends badly
            kept |= {key: line[key] for key in line if key not in ("unit", "part", "name")}
    failed = {}
    for part in parts:
        faults = {name: fault for name, unit in units[part].items() if (fault := _fault(unit))}
        failed[part] = faults if units[part] else {"all": "no unit ran"}
    code = 1 if failed.get("checks") else 2 if any(failed.values()) else 0
    return {"kind": "gpu", "environment": facts, **units, "failed": failed, "exit_code": code}


def _fault(unit: Record) -> str | None:
    if unit["state"] == "done":
        return "; ".join(unit["record"].get("faults", ())) or None
    return unit.get("error", unit["state"])


def _name(content: Record) -> str:
    device = content["environment"].get("device", "unknown device")
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return f"gpu-reduced-{name}" if content["reduced"] else f"gpu-{name}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--minutes", type=float, default=7.5, help="for all parts; each ends in its share of them")
    add("--reduced", action="store_true", help="tiny, on the CPU, in Triton's interpreter")
    add("--out", type=Path, help="folder of the JSON file")
    add("--name", help="name of the JSON file, without its ending")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
