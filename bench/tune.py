"""Time candidate tiles of the attention kernels on this device, and print rows for the tile table.

    python -m bench.tune                  every kind, dtype and head size; minutes
    python -m bench.tune --dims 128 --kinds wide

A wide tile is timed on prefill, a narrow one on decoding. The tile in the table is the first
candidate, so that every other one is held to its results. A JSON file keeps every candidate's time,
or why it has none: it does not compile, does not fit, spills or gives other results. No table is
filled in: rows are for `tcb/kernels/gpu/tuning.py`, where the compile gate holds them.
"""

import argparse
import itertools
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from bench import kernels
from bench.lib import machine
from bench.lib.attention import WORKLOADS, Workload, build, needed_bytes, reduced
from bench.lib.contenders import Call, tcb
from bench.lib.machine_code import PROCESSORS, count_resident
from bench.lib.records import Record
from bench.lib.results import RESULTS, ROOT, store
from tcb.kernels.gpu.tuning import Tile, choose_tile, read_device, shared_need

_WORKLOADS = {"wide": WORKLOADS[1], "narrow": WORKLOADS[0]}
# rows, keys, warps and stages to combine
_SHAPES = {
    "wide": ((32, 64, 128), (16, 32, 64, 128), (4, 8), (1, 2, 3, 4)),
    "narrow": ((16,), (16, 32, 64, 128), (2, 4, 8), (2, 3, 4, 5)),
}
_REDUCED_SHAPES = {
    "wide": ((16, 32), (32,), (4,), (2,)),
    "narrow": ((16,), (16, 32), (4,), (2,)),
}
# sums in fp32 that the threads of a warp can keep, 128 of their 255 registers each
_SCORES_A_WARP = 4096
_ROUNDS = 9
# a smaller gain is noise: the tile in the table stays
_WORTH = 0.02
JIT_KERNELS = "tcb.kernels.gpu.paged_attention", "tcb.kernels.gpu.paged_decode"
DECODE_KERNEL = "paged_decode_kernel"


@dataclass(slots=True)
class Candidate:
    """A tile under measurement, what its kernels use, and whether it is the row of the table."""

    tile: Tile
    is_row: bool
    usages: list[Record] = field(default_factory=list)


def main() -> int:
    """Time as the command line says and print rows; 1 if a row has no tile. Writes the file."""
    given = _parse()
    if given.reduced and os.environ.get("TRITON_INTERPRET") != "1":
        # settled where Triton is loaded, so in a process that begins with it
        command = [sys.executable, "-m", "bench.tune", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"TRITON_INTERPRET": "1"})
    device = torch.device("cpu") if given.reduced else machine.current_device()
    if device.type == "cpu" and not given.reduced:
        print("no accelerator: --reduced runs on a CPU", file=sys.stderr)
        return 1
    name = read_device(device.type, device.index).name
    content: Record = {"kind": "tiles", "class": name, "environment": machine.facts(device)}
    content["groups"] = groups = []
    suffix = re.sub(r"[^a-z0-9]+", "-", content["environment"]["device"].lower()).strip("-")
    folder = given.out or (ROOT / "build" if given.reduced else RESULTS)
    dims = [16] if given.reduced else given.dims
    for kind, dtype, dim in itertools.product(given.kinds, given.dtypes, dims):
        record = time_tiles(kind, getattr(torch, dtype), dim, device, given.reduced)
        groups.append({"kind": kind, "dtype": dtype, "dim": dim, **record})
        print(_shown(name, groups[-1]), flush=True)
        path = store(f"tiles-{'reduced-' * given.reduced}{suffix}", content, folder)
    print(path)
    return int(any(group["best"] is None for group in groups))


def time_tiles(
    kind: str, dtype: torch.dtype, dim: int, device: torch.device, small: bool
) -> Record:
    """Times of every candidate for one row of the table, and the best of them.

    A candidate runs with the residency that its compiled decode has, and is named with it. Where
    no compiler tells (the interpreter, devices of no known class) that is 1: the compile gate has
    the right one.
    """
    workload = replace(_WORKLOADS[kind], dim=dim)
    workload = replace(reduced(workload), sequences=((40, 1), (33, 1))) if small else workload
    if kind == "wide" and small:
        workload = replace(workload, sequences=((0, 40),))
    # the row of the table keeps its own residency
    candidates = [
        Candidate(tile, is_row=place == 0)
        for place, tile in enumerate(tiles(kind, workload, dtype, device, small))
    ]
    count = kernels.sets_for(workload.bytes_moved(dtype.itemsize), needed_bytes(workload), device)
    if not count:
        return {"skipped": "memory", "best": None, "tiles": {}}
    sets = [build(workload, device, dtype, seed) for seed in range(count)]
    prepared = {
        str(place): lambda tensors, candidate=candidate: _with_tile(
            tcb(workload, tensors), kind, candidate
        )
        for place, candidate in enumerate(candidates)
    }
    raced = kernels.race(prepared, sets, device, 1 if small else _ROUNDS)
    results = {
        described(kind, candidate.tile): result | {"resources": candidate.usages}
        for candidate, result in zip(candidates, raced.values(), strict=True)
    }
    usable = {label: r["us"] for label, r in results.items() if "us" in r and _is_right(r)}
    best, first = min(usable, key=usable.get, default=None), next(iter(results))
    if first in usable and usable[best] > (1 - _WORTH) * usable[first]:
        best = first
    gain = round(usable[first] / usable[best], 3) if first in usable else None
    return {"workload": workload.name, "present": first, "best": best, "gain": gain} | {
        "tiles": results
    }


def tiles(
    kind: str, workload: Workload, dtype: torch.dtype, device: torch.device, small: bool
) -> Iterator[Tile]:
    """The tile in the table, then every other one that may fit the device, of residency 1."""
    known, dim = read_device(device.type, device.index), workload.dim
    group = workload.heads // workload.kv_heads
    present = choose_tile(known.name, kind, dtype.itemsize, dim, group, known.shared)
    yield present
    base = replace(present, residency=1)
    shapes = _REDUCED_SHAPES if small else _SHAPES
    for rows, keys, warps, stages in itertools.product(*shapes[kind]):
        if kind == "narrow":
            rows = max(rows, 1 << (group - 1).bit_length())
        tile = replace(base, rows=rows, keys=keys, warps=warps, stages=stages)
        fits = rows * max(keys, dim) <= warps * _SCORES_A_WARP and (
            known.shared is None
            or shared_need(known.name, tile, dtype.itemsize, dim) <= known.shared
        )
        if fits and replace(tile, residency=present.residency) != present:
            yield tile


@contextmanager
def forced(kind: str, tile: Tile) -> Iterator[None]:
    """Launches of this kind take this tile, whatever the table says."""
    askers = [import_module(name) for name in JIT_KERNELS]
    assert all(module.choose_tile is choose_tile for module in askers), "a launcher asks elsewhere"

    def chosen(name: str, asked: str, *rest: Any, **more: Any) -> Tile:
        return tile if asked == kind else choose_tile(name, asked, *rest, **more)

    for module in askers:
        module.choose_tile = chosen
    try:
        yield
    finally:
        for module in askers:
            module.choose_tile = choose_tile


def _with_tile(call: Call, kind: str, candidate: Candidate) -> Call:
    """The call with this tile; it adds what newly compiled kernels use, and refuses spills."""
    usages = candidate.usages

    def run() -> torch.Tensor:
        before = _kernels()
        with forced(kind, candidate.tile):
            out = call()
        name = read_device(out.device.type, out.device.index).name
        new = [kernel for key, kernel in _kernels().items() if key not in before]
        usages.extend(read_usage(kernel, name) for kernel in new)
        if any(usage["spills"] for usage in usages):
            raise RuntimeError(f"spills: {usages}")
        if new and not candidate.is_row:
            candidate.tile = with_residency(candidate.tile, usages)
        return out

    return run


def _kernels() -> dict[int, Any]:
    """Every compiled form of the attention kernels in this process."""
    found = {}
    for name in JIT_KERNELS:
        for value in vars(sys.modules.get(name) or object).values():
            for cached in getattr(value, "device_caches", {}).values():
                found |= {id(kernel): kernel for kernel in cached[0].values()}
    return found


def read_usage(kernel: Any, name: str) -> Record:
    """What a compiled kernel takes, and how many programs a processor of this class holds."""
    registers, shared = kernel.n_regs, kernel.metadata.shared
    threads = kernel.metadata.num_warps * kernel.metadata.warp_size
    known = (p for p in PROCESSORS.values() if p.device_class == name != "other")
    processor = next(known, None)
    return {
        "kernel": kernel.metadata.name,
        "registers": registers,
        "spills": kernel.n_spills,
        "shared": shared,
        "resident": processor and count_resident(processor, registers, threads, shared),
    }


def with_residency(tile: Tile, usages: list[Record]) -> Tile:
    """The tile with as many programs as a processor holds of each of its compiled decodes."""
    decodes = [usage for usage in usages if usage["kernel"] == DECODE_KERNEL]
    counts = [usage["resident"] or 1 for usage in decodes]
    return replace(tile, residency=min(counts, default=tile.residency))


def described(kind: str, tile: Tile) -> str:
    """A tile as the table writes it."""
    shape = f"{tile.rows}, {tile.keys}, {tile.warps}, {tile.stages}"
    if tile.zones:
        options = "".join(f", {name}={value}" for name, value in tile.options.items())
        return f"_wide({shape}{options})"
    if kind == "narrow":
        return f"_narrow({shape}, residency={tile.residency})"
    return f"Tile({shape})"


def _is_right(result: Record) -> bool:
    distance = result.get("difference")
    return distance is None or (isinstance(distance, float) and distance < 0.02)


def _shown(name: str, group: Record) -> str:
    lines = [f"{group['kind']}, {group['dtype']}, head size {group['dim']}:"]
    results = group["tiles"]
    timed = sorted((r["us"], label) for label, r in results.items() if "us" in r)
    lines += [f"  {us:10.1f} us  {label}" for us, label in timed[:5]]
    dropped = [f"{label}: {r['cannot'][:80]}" for label, r in results.items() if "cannot" in r]
    lines += [f"  {len(dropped)} of {len(results)} candidates have no time", *dropped[:3]]
    row = f'("{name}", "{group["kind"]}"): ({group["dim"]}, {group["best"]})'
    return "\n".join([*lines, f"  {row}, {group.get('gain')} times as fast as the table's"])


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
