"""Time contenders in turn under graph replay and put the times beside the floors.

Each contender has one captured graph that runs once over every set of inputs; the sets together are
larger than the cache, so that each call reads memory. Rounds take turns over the contenders; times
are medians. It knows no kernel.
"""

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch

from bench.accelerator import machine
from bench.accelerator.contenders import CONTENDERS, CannotRun
from bench.accelerator.workloads import Workload, build, needed_bytes

Record = dict[str, Any]
Call = Callable[[], Any]
Prepare = Callable[[Any], Call]

_MOST_SETS = 16
# of the free memory, what the sets may take
_MEMORY_SHARE = 0.6


def time_attention(workload: Workload, device: torch.device, rounds: int) -> Record:
    """Time every contender on an attention workload; a difference of results is a `fault`."""
    facts = {
        "sequences": len(workload.sequences),
        "query_tokens": workload.tokens,
        "window": workload.window,
        "heads": [workload.heads, workload.kv_heads, workload.dim],
        "page_size": workload.page_size,
    }
    count = sets_for(workload.bytes_moved(), needed_bytes(workload), device)
    if not count:
        needed = needed_bytes(workload) / 2**30
        return facts | {"skipped": f"{needed:.1f} GiB do not fit the free memory"}
    sets = [build(workload, device, seed=seed) for seed in range(count)]
    prepared = {
        name: (lambda tensors, make=make: make(workload, tensors))
        for name, make in CONTENDERS.items()
    }
    contenders = race(prepared, sets, device, rounds)
    floors = beside_floors(workload.bytes_moved(), workload.flop(), device)
    found = summary(contenders, floors["floor_us"])
    return facts | rotation(count, workload.bytes_moved(), device) | floors | found


def sets_for(traffic: int, size: int, device: torch.device) -> int:
    """Sets of inputs to rotate: enough to outgrow the cache, none if not even two fit."""
    wanted = max(2, math.ceil(machine.CACHE_FACTOR * machine.cache_bytes(device) / traffic))
    fitting = int(_MEMORY_SHARE * machine.free_memory(device)) // size
    count = min(wanted, fitting, _MOST_SETS)
    return count if count >= 2 else 0


def rotation(count: int, traffic: int, device: torch.device) -> Record:
    """How many sets take turns, and whether they outgrow the cache: if not, it is what is timed."""
    outgrows = count * traffic >= machine.CACHE_FACTOR * machine.cache_bytes(device)
    return {"sets": count, "outgrows_cache": outgrows}


def race(
    prepared: dict[str, Prepare], sets: list[Any], device: torch.device, rounds: int
) -> Record:
    """Seconds of every contender, in turn; or why it cannot run. The first one is the reference.

    A contender that cannot run has `raised` where that is an error and no way it lacks.
    """
    results: dict[str, Record] = {}
    replays: dict[str, tuple[Call, int]] = {}
    reference = None
    for name, prepare in prepared.items():
        try:
            calls = [prepare(tensors) for tensors in sets]
            out = calls[0]()
            machine.synchronize(device)
            results[name] = {"difference": difference(out, reference)}
            reference = out.clone() if reference is None and torch.is_tensor(out) else reference
            replay, no_graph = machine.capture(lambda calls=calls: [c() for c in calls], device)
            results[name]["no_graph"] = no_graph
            replays[name] = replay, machine.repeats_for(replay, device)
        except CannotRun as reason:
            results[name] = {"cannot": str(reason)}
        except Exception as error:
            text = f"{type(error).__name__}: {_first_line(error)}"
            results[name] = {"cannot": text, "raised": True}
            # a device that no longer answers ends this unit here
            machine.synchronize(device)
    times: dict[str, list[float]] = {name: [] for name in replays}
    for turn in range(rounds):
        names = list(replays)
        first = turn % max(1, len(names))
        for name in names[first:] + names[:first]:
            replay, repeats = replays[name]
            times[name].append(machine.seconds(replay, repeats, device) / len(sets))
    for name, values in times.items():
        results[name] |= {
            "us": round(1e6 * statistics.median(values), 2),
            "us_range": [round(1e6 * bound, 2) for bound in (min(values), max(values))],
        }
    return results


def difference(out: Any, reference: torch.Tensor | None) -> float | str | None:
    """Relative distance of two results in L2, or that one is not finite; None without one."""
    if reference is None or not torch.is_tensor(out) or out.shape != reference.shape:
        return None
    out, reference = out.double(), reference.double()
    if not (torch.isfinite(out).all() and torch.isfinite(reference).all()):
        return "not finite"
    return (torch.linalg.vector_norm(out - reference) / torch.linalg.vector_norm(reference)).item()


def beside_floors(traffic: int, flop: int, device: torch.device) -> Record:
    """The floors of a launch on this device, from the ceilings measured on it."""
    limits = machine.ceilings(device)
    bandwidth = max(limits["copy_bytes_per_second"], limits["read_bytes_per_second"])
    by_bytes, by_flop = traffic / bandwidth, flop / limits["bf16_flop_per_second"]
    return {
        "bytes": traffic,
        "flop": flop,
        "bytes_floor_us": round(1e6 * by_bytes, 3),
        "flop_floor_us": round(1e6 * by_flop, 3),
        "floor_us": round(1e6 * max(by_bytes, by_flop), 3),
    }


def summary(contenders: Record, floor_us: float) -> Record:
    """All times; ours over the floor, and how many times as long the fastest comparator takes."""
    timed = {name: result["us"] for name, result in contenders.items() if "us" in result}
    own = timed.get("tcb")
    others = {name: us for name, us in timed.items() if not name.startswith("tcb")}
    best = min(others, key=others.get, default=None)
    return {
        "contenders": contenders,
        "over_floor": own and round(own / floor_us, 3),
        "best_comparator": best,
        "ratio_to_best": own and best and round(others[best] / own, 3),
    }


def faults(record: Record) -> list[str]:
    """What is wrong with a record: one of ours failed, or results differ more than bf16 explains.

    Two attentions of bf16 operands differ by a few roundings of 2^-9 relative to their norm; 2 %
    is a different function.
    """
    contenders = record.get("contenders", {})
    found = []
    for name, result in contenders.items():
        is_own = name.startswith("tcb")
        if is_own and result.get("raised"):
            found.append(f"{name}: {result['cannot']}")
        if is_own and (result.get("no_graph") or "").startswith(machine.NOT_CAPTURABLE):
            found.append(f"{name}: {result['no_graph']}")
        distance = result.get("difference")
        if distance is not None and not (isinstance(distance, float) and distance < 0.02):
            found.append(f"{name} differs from tcb: {distance}")
    return found


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]
