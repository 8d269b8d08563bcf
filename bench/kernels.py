"""Time kernels beside torch's, cuDNN and FlashAttention-3, and beside the floors of the device.

    python -m bench.kernels [the options of bench.gpu]

Each contender has one captured graph that runs once over every set of inputs; the sets together are
larger than the cache, so that each call reads memory. Rounds take turns over the contenders; times
are medians. Floors count every byte that must be read or written once. The command runs the part
`timings` of `bench.gpu` alone.
"""

import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench import gpu
from bench.lib import machine
from bench.lib.attention import Workload, build, choose, needed_bytes
from bench.lib.contenders import CONTENDERS, CannotRun
from bench.lib.records import Record, Unit
from tcb.kernels import copy_blocks, page_tables, sample, write_kv

Call = Callable[[], Any]
Prepare = Callable[[Any], Call]

_HEADS, _DIM, _PAGE = 8, 128, 256
_ROUNDS = 15
_MOST_SETS = 16
# of the free memory, what the sets may take
_MEMORY_SHARE = 0.6


def units(device: torch.device, small: bool) -> Iterator[tuple[str, Unit]]:
    """The attention workloads and the small operations, by name, in the order of their timing."""
    rounds = 1 if small else _ROUNDS
    for workload in choose(small):
        yield workload.name, partial(_unit, partial(time_attention, workload, device, rounds))
    for name, operation in operations(small).items():
        yield name, partial(_unit, partial(time_operation, operation, device, rounds))


def _unit(timed: Callable[[], Record], seconds: float, keep: Callable[[Record], None]) -> Record:
    record = timed()
    return record | {"faults": faults(record)}


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


@dataclass(frozen=True, slots=True)
class Operation:
    """`build(device)` makes one set of inputs; `calls` turn a set into something to time."""

    traffic: int
    size: int
    build: Callable[[torch.device], Any]
    calls: dict[str, Callable[[Any], Callable[[], Any]]]


def operations(small: bool) -> dict[str, Operation]:
    """Every operation at the sizes that matter, or tiny."""
    tokens, rows, vocab, blocks = (12, 2, 500, 8) if small else (16384, 64, 151_936, 1024)
    tables = 4 if small else 1024
    return {
        f"write {tokens} tokens": _write(tokens),
        "write 64 tokens": _write(4 if small else 64),
        f"tables of {tables} sequences": _tables(tables),
        f"copy {blocks} blocks": _copy(blocks, 1024 if small else 2**19),
        f"greedy, {rows} x {vocab}": _sample(rows, vocab, do_sample=False),
        f"top-k, top-p, {rows} x {vocab}": _sample(rows, vocab, do_sample=True),
    }


def time_operation(operation: Operation, device: torch.device, rounds: int) -> Record:
    """Time one operation beside torch's."""
    count = sets_for(operation.traffic, operation.size, device)
    if not count:
        return {"skipped": f"{operation.size / 2**30:.1f} GiB do not fit the free memory"}
    sets = [operation.build(device) for _ in range(count)]
    contenders = race(operation.calls, sets, device, rounds)
    floors = beside_floors(operation.traffic, 0, device)
    found = summary(contenders, floors["floor_us"])
    return rotation(count, operation.traffic, device) | floors | found


def _write(tokens: int) -> Operation:
    blocks = -(-tokens // _PAGE) + 1

    def build(device: torch.device) -> tuple:
        new = torch.randn(2, tokens, _HEADS, _DIM, device=device).bfloat16()
        caches = torch.zeros(2, blocks, _PAGE, _HEADS, _DIM, device=device).bfloat16()
        slot = torch.randperm(blocks * _PAGE, device=device)[:tokens]
        return *new, *caches, slot

    def indexed(key, value, key_cache, value_cache, slot):
        for new, cache in ((key, key_cache), (value, value_cache)):
            cache.view(-1, _HEADS, _DIM).index_copy_(0, slot, new)

    traffic = 2 * 2 * 2 * tokens * _HEADS * _DIM + 8 * tokens
    calls = {"tcb": lambda s: partial(write_kv, *s), "torch": lambda s: partial(indexed, *s)}
    return Operation(traffic, 2 * traffic, build, calls)


def _tables(sequences: int) -> Operation:
    # a full group and the ring of a sliding one; each 64th sequence gets a page in both
    widths = 128, 6

    def build(device: torch.device) -> dict[str, Any]:
        def count(*shape: int) -> torch.Tensor:
            numbers = torch.arange(math.prod(shape), dtype=torch.int32, device=device)
            return numbers.view(shape)

        pages = (count(2 * sequences) % 64 == 0).int()
        return {
            "tables": [count(sequences, width) for width in widths],
            "edit": count(2 * sequences),
            "edit_start": torch.cat([pages[:1] * 0, pages.cumsum(0).int()]),
            "edit_page": count(2 * sequences) % min(widths),
            "row": torch.randperm(sequences, device=device),
            "query_start": count(sequences + 1),
            "context_len": count(sequences),
            "page_size": _PAGE,
            "slot": torch.empty(2, sequences, dtype=torch.int64, device=device),
            "block_tables": [count(sequences, width) for width in widths],
        }

    def rows_alone(tables: list[torch.Tensor], row: torch.Tensor) -> list[torch.Tensor]:
        # less than what is asked
        return [table.index_select(0, row) for table in tables]

    calls = {
        "tcb": lambda s: partial(page_tables, **s),
        "torch, rows alone": lambda s: partial(rows_alone, s["tables"], s["row"]),
    }
    traffic = sequences * (2 * 4 * sum(widths) + 2 * 24)
    return Operation(traffic, 2 * traffic, build, calls)


def _copy(blocks: int, elements: int) -> Operation:
    def build(device: torch.device) -> tuple:
        cache = torch.randn(2 * blocks, elements, device=device).bfloat16()
        order = torch.randperm(2 * blocks, device=device)
        return cache, order[:blocks].contiguous(), order[blocks:].contiguous()

    def indexed(cache, source, target):
        cache[target] = cache[source]

    traffic = 2 * 2 * blocks * elements
    calls = {"tcb": lambda s: partial(copy_blocks, *s), "torch": lambda s: partial(indexed, *s)}
    return Operation(traffic, 3 * traffic, build, calls)


def _sample(rows: int, vocab: int, do_sample: bool) -> Operation:
    def build(device: torch.device) -> dict[str, torch.Tensor]:
        def full(value: Any) -> torch.Tensor:
            return torch.full((rows,), value, device=device)

        return {
            "logits": (3 * torch.randn(rows, vocab, device=device)).bfloat16(),
            "temperature": full(0.8),
            "top_k": full(50 if do_sample else 0),
            "top_p": full(0.95 if do_sample else 1.0),
            "min_p": full(0.0),
            "seed": torch.arange(rows, device=device),
            "position": torch.arange(rows, device=device),
            "do_sample": full(do_sample),
        }

    # torch only sorts, or takes the highest: less than what is asked
    other = partial(torch.sort, dim=-1) if do_sample else partial(torch.argmax, dim=-1)
    name = "torch, sort alone" if do_sample else "torch, argmax alone"
    calls = {
        "tcb": lambda s: partial(sample, **s),
        name: lambda s: partial(other, s["logits"]),
    }
    traffic = 2 * rows * vocab
    return Operation(traffic, 8 * traffic, build, calls)


if __name__ == "__main__":
    raise SystemExit(gpu.main(["--parts", "timings", *sys.argv[1:]]))
