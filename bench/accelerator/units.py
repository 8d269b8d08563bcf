"""Run parts of the measurement in this process and record each unit as it begins and ends.

A program for `bench.gpu`, which starts it again behind a unit that took the process with it. It
knows which units there are, and not what becomes of their records.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.accelerator import (
    checks,
    device_checks,
    machine,
    operations,
    serving,
    step_checks,
    timings,
    workloads,
)
from bench.environment import describe
from bench.gpu import append, read

Record = dict[str, Any]
# a unit gets its seconds and a way to keep a record before its end
Unit = Callable[[float, Callable[[Record], None]], Record]

# exit code for a device that answers no more
BROKEN = 3
_ROUNDS = 15
_CHECKS = (
    checks.attention_checks,
    checks.replay_checks,
    step_checks.sampling_checks,
    device_checks.table_checks,
    device_checks.invariance_checks,
    device_checks.full_size_checks,
    step_checks.engine_checks,
    device_checks.overflow_checks,
)


def list_units(part: str, device: torch.device, small: bool) -> Iterator[tuple[str, Unit]]:
    """The units of a part, by name, in the order in which they run."""
    rounds = 1 if small else _ROUNDS
    match part:
        case "checks":
            for made in _CHECKS:
                for name, check in made(device, small):
                    yield name, lambda seconds, keep, check=check: check()
        case "timings":
            for workload in workloads.choose(small):
                timed = partial(timings.time_attention, workload, device, rounds)
                yield workload.name, partial(_judged, timed)
            for name, operation in operations.operations(small).items():
                timed = partial(operations.time_operation, operation, device, rounds)
                yield name, partial(_judged, timed)
        case "serving":
            models = serving.TINY_MODELS if small else serving.MODELS
            for place, model in enumerate(models):
                yield model, partial(_served, model, device, 1 / (len(models) - place), small)


def _judged(timed: Callable[[], Record], seconds: float, keep: Callable[[Record], None]) -> Record:
    record = timed()
    return record | {"faults": timings.faults(record)}


def _served(
    model: str,
    device: torch.device,
    share: float,
    small: bool,
    seconds: float,
    keep: Callable[[Record], None],
) -> Record:
    record = serving.serve(model, device, share * seconds, keep, small)
    return record | {"faults": serving.faults(record)}


def run(
    part: str, share: tuple[int, int], path: Path, end: float, small: bool, device: torch.device
) -> None:
    """Run the units of a part that are this process's and not begun yet. Appends to the file."""
    begun = {line["unit"] for line in read(path) if line["state"] == "begun"}
    mine = list(list_units(part, device, small))[share[0] :: share[1]]
    for name, unit in mine:
        if f"{part}: {name}" in begun:
            continue
        left = end - time.time()
        write = partial(_write, path, {"unit": f"{part}: {name}", "part": part, "name": name})
        write(state="begun")
        if left <= 0:
            write(state="out of time")
            continue
        start = time.perf_counter()
        keep = partial(_keep, write)
        try:
            record = unit(left, keep)
        except torch.OutOfMemoryError as error:
            # nothing is wrong with what did not fit beside the other processes
            text = str(error).splitlines()[0][:200]
            write(state="done", record={"skipped": f"out of memory: {text}"}, seconds=_since(start))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            where = traceback.format_exc()[-1500:]
            write(state="failed", error=text[:2000], traceback=where, seconds=_since(start))
            _end_if_broken(device)
        else:
            write(state="done", record=record, seconds=_since(start))
        machine.release_memory(device)


def _keep(write: Callable[..., None], record: Record) -> None:
    write(state="partial", record=record)


def _write(path: Path, shared: Record, **more: Any) -> None:
    append(path, shared | more)


def _since(start: float) -> float:
    return round(time.perf_counter() - start, 2)


def _end_if_broken(device: torch.device) -> None:
    """Leave the process where an error has made the device unusable in it."""
    try:
        machine.synchronize(device)
        torch.zeros(1, device=device).item()
    except Exception:
        traceback.print_exc()
        # no tidying up: that would meet the same error
        sys.stderr.flush()
        raise SystemExit(BROKEN) from None


def facts(device: torch.device, with_ceilings: bool) -> Record:
    """Where this runs: device, driver, versions, commit; and what the device reaches."""
    found = describe(device) | {"driver": machine.driver(device)}
    found |= {"cuda": torch.version.cuda, "hip": torch.version.hip}
    if device.type != "cpu":
        found["cache_bytes"] = machine.cache_bytes(device)
        found["free_memory"] = machine.free_memory(device)
    return found | ({"ceilings": machine.ceilings(device)} if with_ceilings else {})


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=("checks", "timings", "serving"))
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), metavar=("I", "N"))
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--end", type=float, required=True, help="time to stop, as of time.time()")
    parser.add_argument("--reduced", action="store_true")
    given = parser.parse_args()
    device = torch.device("cpu") if given.reduced else machine.current_device()
    if device.type == "cpu" and not given.reduced:
        raise SystemExit("no accelerator: --reduced runs on a CPU")
    try:
        found = facts(device, "timings" in given.parts)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    append(given.record, {"state": "facts", "unit": "", "record": found})
    for part in given.parts:
        run(part, tuple(given.share), given.record, given.end, given.reduced, device)


if __name__ == "__main__":
    main()
