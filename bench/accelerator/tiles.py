"""Candidate tiles of the attention kernels, timed in turn on the workloads that they are for.

A wide tile is timed on prefill, a narrow one on decoding. The tile in the table is the first
candidate, so that every other one is held to its results. What does not compile, does not fit or
gives other results is kept with the reason. It knows what a tile is, and no kernel's inside.
"""

import itertools
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.accelerator import machine, timings
from bench.accelerator.contenders import Call, tcb
from bench.accelerator.units import facts
from bench.accelerator.workloads import WORKLOADS, Workload, build, needed_bytes, reduced
from bench.environment import store
from tcb.kernels.tuning import Tile, choose_tile, read_device, shared_need

Record = dict[str, Any]

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
JIT_KERNELS = "tcb.kernels.paged_attention_kernel", "tcb.kernels.paged_decode_kernel"


def tune(kinds: list[str], dtypes: list[str], dims: list[int], small: bool, folder: Path) -> int:
    """Time all groups of candidates, print rows and write the file after each; the exit code."""
    device = torch.device("cpu") if small else machine.current_device()
    if device.type == "cpu" and not small:
        print("no accelerator: --reduced runs on a CPU", file=sys.stderr)
        return 1
    name = read_device(device.type, device.index).name
    content: Record = {"kind": "tiles", "class": name, "environment": facts(device, False)}
    content["groups"] = groups = []
    for kind, dtype, dim in itertools.product(kinds, dtypes, [16] if small else dims):
        record = time_tiles(kind, getattr(torch, dtype), dim, device, small)
        groups.append({"kind": kind, "dtype": dtype, "dim": dim, **record})
        print(_shown(name, groups[-1]), flush=True)
        suffix = re.sub(r"[^a-z0-9]+", "-", content["environment"]["device"].lower()).strip("-")
        path = store(f"tiles-{'reduced-' * small}{suffix}", content, folder)
    print(path)
    return int(any(group["best"] is None for group in groups))


def time_tiles(
    kind: str, dtype: torch.dtype, dim: int, device: torch.device, small: bool
) -> Record:
    """Times of every candidate for one row of the table, and the best of them."""
    workload = replace(_WORKLOADS[kind], dim=dim)
    workload = replace(reduced(workload), sequences=((40, 1), (33, 1))) if small else workload
    if kind == "wide" and small:
        workload = replace(workload, sequences=((0, 40),))
    candidates = list(tiles(kind, workload, dtype, device, small))
    count = timings.sets_for(workload.bytes_moved(dtype.itemsize), needed_bytes(workload), device)
    if not count:
        return {"skipped": "memory", "best": None, "tiles": {}}
    sets = [build(workload, device, dtype, seed) for seed in range(count)]
    usages: dict[str, list[Record]] = {described(tile): [] for tile in candidates}
    prepared = {
        described(tile): lambda tensors, tile=tile: _with_tile(
            tcb(workload, tensors), kind, tile, usages[described(tile)]
        )
        for tile in candidates
    }
    results = timings.race(prepared, sets, device, 1 if small else _ROUNDS)
    for label, result in results.items():
        result["resources"] = usages[label]
    usable = {label: r["us"] for label, r in results.items() if "us" in r and _is_right(r)}
    best, first = min(usable, key=usable.get, default=None), described(candidates[0])
    if first in usable and usable[best] > (1 - _WORTH) * usable[first]:
        best = first
    gain = round(usable[first] / usable[best], 3) if first in usable else None
    return {"workload": workload.name, "present": first, "best": best, "gain": gain} | {
        "tiles": results
    }


def tiles(
    kind: str, workload: Workload, dtype: torch.dtype, device: torch.device, small: bool
) -> Iterator[Tile]:
    """The tile in the table, then every other one that may fit the device."""
    known, dim = read_device(device.type, device.index), workload.dim
    group = workload.heads // workload.kv_heads
    present = choose_tile(known.name, kind, dtype.itemsize, dim, group, known.shared)
    yield present
    shapes = _REDUCED_SHAPES if small else _SHAPES
    for rows, keys, warps, stages in itertools.product(*shapes[kind]):
        if kind == "narrow":
            rows = max(rows, 1 << (group - 1).bit_length())
        tile = replace(present, rows=rows, keys=keys, warps=warps, stages=stages)
        fits = rows * max(keys, dim) <= warps * _SCORES_A_WARP and (
            known.shared is None
            or shared_need(known.name, tile, dtype.itemsize, dim) <= known.shared
        )
        if tile != present and fits:
            yield tile


@contextmanager
def forced(kind: str, tile: Tile) -> Iterator[None]:
    """Launches of this kind take this tile, whatever the table says."""
    askers = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("tcb.kernels.") and vars(module).get("choose_tile") is choose_tile
    ]
    # the table's own file is one of them
    assert len(askers) > 1, "no launcher asks choose_tile for its tile"

    def chosen(name: str, asked: str, *rest: Any, **more: Any) -> Tile:
        return tile if asked == kind else choose_tile(name, asked, *rest, **more)

    for module in askers:
        module.choose_tile = chosen
    try:
        yield
    finally:
        for module in askers:
            module.choose_tile = choose_tile


def _with_tile(call: Call, kind: str, tile: Tile, usages: list[Record]) -> Call:
    """The call with this tile; it adds what newly compiled kernels use, and refuses spills."""

    def run() -> torch.Tensor:
        before = _kernels()
        with forced(kind, tile):
            out = call()
        usages.extend(_usage(kernel) for key, kernel in _kernels().items() if key not in before)
        if any(usage["spills"] for usage in usages):
            raise RuntimeError(f"spills: {usages}")
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


def _usage(kernel: Any) -> Record:
    return {
        "kernel": kernel.metadata.name,
        "registers": kernel.n_regs,
        "spills": kernel.n_spills,
        "shared": kernel.metadata.shared,
    }


def described(tile: Tile) -> str:
    """A tile as the table writes it."""
    shape = f"{tile.rows}, {tile.keys}, {tile.warps}, {tile.stages}"
    options = "".join(f", {name}={value}" for name, value in tile.options.items())
    if tile.zones:
        return f"_wide({shape}{options})"
    return f"Tile({shape}{f', options={tile.options}' if tile.options else ''})"


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
