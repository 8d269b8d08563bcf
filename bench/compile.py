"""What the compiler makes of every launch, for each architecture: the rows of the compile gate.

    python -m bench.compile [sm_90 gfx942 ...] [--folder bench/results]

No accelerator is needed: kernels are compiled ahead of time, as tests/kernels/test_compile.py does.
Each launch is kept with its kind and the fields of the call that starts it, and

    tile            rows and keys of a tile, warps, pipeline stages
    registers, spills, local, threads   of a thread; bytes of local memory; threads of a program
    shared, shared_need                 bytes that a program takes, and the bound that is promised
    resident, claimed                   programs that a processor holds, and as many as promised
    buffers         tiles of keys or of values in each buffer of the pipelines
    loads, stores, copies               instructions on global memory by their bits; copies are
                                        asynchronous
    HGMMA, HMMA, UTCHMMA, MFMA          instructions of the matrix units
    bytes_in_flight resident * tiles ahead * keys a tile * (dim + value_dim) * bytes an element:
                    what a processor has on its way even while its programs multiply; the tiles
                    ahead are the buffers less the one that is read, on AMD one tile in registers
    hash            of the machine code: it tells of a compiler that has changed its mind

It measures no time on a device.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bench.lib.machine_code import PROCESSORS
from bench.lib.results import RESULTS, ROOT, describe, store


def main() -> None:
    """Compile, keep the figures and print a line an architecture."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    names = ", ".join(PROCESSORS)
    parser.add_argument("architectures", nargs="*", metavar="NAME", help=names)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    environment = describe(torch.device("cpu"))
    launches = []
    for name in arguments.architectures or PROCESSORS:
        begin = perf_counter()
        found = compile_all(name)
        spilling = sum(launch["spills"] > 0 for launch in found)
        seconds = perf_counter() - begin
        print(f"{name}: {len(found)} launches, {spilling} spill registers, {seconds:.0f} s")
        launches += found
    content = {"kind": "compile", "environment": environment, "launches": launches}
    print(store("compile", content, arguments.folder))


def compile_all(name: str) -> list[dict[str, Any]]:
    """The launches of every row, compiled for one architecture in a process of its own."""
    # the interpreter is chosen when Triton is loaded
    environment = {key: text for key, text in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.lib.compile_rows", name]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT, check=True
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    device_class = {"class": PROCESSORS[name].device_class}
    return [device_class | launch for row in rows for launch in row]


if __name__ == "__main__":
    main()
