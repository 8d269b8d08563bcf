"""Run the timings or the serving of the measurement in this process, one unit after the other.

    python -m bench.lib.units timings --record FILE --end TIME [--reduced]

`bench.gpu` starts it, and starts it again behind a unit that took the process with it.
"""

import argparse
import time
import traceback
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from bench.lib import machine
from bench.lib.records import Recorder, append

# each has `units(device, small)`: names and units, in the order in which they run
_MODULES = {"timings": "bench.kernels", "serving": "bench.lib.serving"}


def run(recorder: Recorder, small: bool, device: torch.device) -> None:
    """Run the units of a part that are not begun yet. Leave the process if the device is broken."""
    begun, module = recorder.begun(), import_module(_MODULES[recorder.part])
    for name, unit in module.units(device, small):
        left = 0.0 if name in begun else recorder.begin(name)
        if not left:
            continue
        start = time.perf_counter()
        write = partial(recorder.write, name)
        try:
            record = unit(left, lambda record, write=write: write("partial", record=record))
        except torch.OutOfMemoryError as error:
            # nothing is wrong with what did not fit
            skipped = f"out of memory: {str(error).splitlines()[0][:200]}"
            write("done", record={"skipped": skipped}, seconds=_since(start))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            where = traceback.format_exc()[-1500:]
            write("failed", error=text[:2000], traceback=where, seconds=_since(start))
            if machine.is_broken(device):
                # no tidying up: that would meet the same error
                raise SystemExit(machine.BROKEN) from None
        else:
            write("done", record=record, seconds=_since(start))
        machine.release_memory(device)


def _since(start: float) -> float:
    return round(time.perf_counter() - start, 2)


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("timings", "serving"))
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--end", type=float, required=True, help="time to stop, as of time.time()")
    parser.add_argument("--reduced", action="store_true")
    given = parser.parse_args()
    device = torch.device("cpu") if given.reduced else machine.current_device()
    if device.type == "cpu" and not given.reduced:
        raise SystemExit("no accelerator: --reduced runs on a CPU")
    append(given.record, machine.facts_line(device, with_ceilings=given.part == "timings"))
    run(Recorder(given.part, given.record, given.end), given.reduced, device)


if __name__ == "__main__":
    main()
