"""Time candidate tiles of the attention kernels on this device, and print rows for the tile table.

    python -m bench.tune                  every kind, dtype and head size; minutes
    python -m bench.tune --dims 128 --kinds wide

Writes a JSON file with every candidate's time, or why it has none. It fills in no table: rows are
for `tcb/kernels/tuning.py`, where the compile gate holds them.
"""

import argparse
import os
from pathlib import Path


def main() -> int:
    """Time as the command line says; the exit code is 1 if a row has no tile."""
    given = _parse()
    if given.reduced:
        # settled where Triton is loaded, so before the imports below
        os.environ["TRITON_INTERPRET"] = "1"
    from bench.accelerator import tiles
    from bench.environment import RESULTS, ROOT

    folder = given.out or (ROOT / "build" if given.reduced else RESULTS)
    return tiles.tune(given.kinds, given.dtypes, given.dims, given.reduced, folder)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--kinds", nargs="+", choices=("wide", "narrow"), default=["wide", "narrow"])
    add("--dtypes", nargs="+", choices=("bfloat16", "float16", "float32"), default=["bfloat16"])
    add("--dims", nargs="+", type=int, default=[64, 128, 256], help="head sizes")
    add("--reduced", action="store_true", help="tiny, on the CPU, in Triton's interpreter")
    add("--out", type=Path, help="folder of the JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
