"""Serving end to end on random weights of real shapes: this package and transformers, side by side.

Both serve the same prompts in one process, in turn, with CUDA graphs asked for and not. It reads no
kernel and no pool.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from bench.lib import machine
from bench.lib.prompts import Workload
from bench.lib.records import Record, Unit
from bench.lib.systems import SYSTEMS
from bench.models import build
from bench.serve import timed
from tcb.planning.config import NO_EFFECT

MODELS = ("random-qwen3-4b", "random-gemma3-4b")
TINY_MODELS = ("random-llama-tiny",)
_WORKLOAD = Workload(requests=64, length=512, new_tokens=96)
_TINY_WORKLOAD = Workload(requests=2, length=6, new_tokens=2)
_ROUNDS = 3
# what one round may take at most, as a share of the time that is left
_SHARE = 0.8
_CONTENDERS = {
    f"{system}, graphs {'on' if graphs else 'off'}": (system, graphs)
    for system in ("tcb", "transformers-cb")
    for graphs in (False, True)
}


def units(device: torch.device, small: bool) -> Iterator[tuple[str, Unit]]:
    """The models, by name; each takes its share of the seconds that are left."""
    models = TINY_MODELS if small else MODELS
    for place, model in enumerate(models):
        yield model, partial(_unit, model, device, 1 / (len(models) - place), small)


def _unit(
    model: str,
    device: torch.device,
    share: float,
    small: bool,
    seconds: float,
    keep: Callable[[Record], None],
) -> Record:
    record = serve(model, device, share * seconds, keep, small)
    return record | {"faults": faults(record)}


def serve(
    name: str, device: torch.device, limit: float, keep: Callable[[Record], None], small: bool
) -> Record:
    """Tokens a second of each contender on one model, within about `limit` seconds.

    `keep` gets the record after every step, so that an early end leaves what was measured.
    """
    end = time.perf_counter() + limit
    workload = _TINY_WORKLOAD if small else _WORKLOAD
    dtype = torch.float32 if small else torch.bfloat16
    model = build(name, dtype, device)
    prompts = workload.prompts(None, model.config.vocab_size)
    contenders: dict[str, Record] = {}
    record = {
        "model": name,
        "dtype": str(dtype).removeprefix("torch."),
        "attention": model.config._attn_implementation,
        "requests": workload.requests,
        "prompt_tokens": sum(map(len, prompts)),
        "new_tokens": workload.new_tokens,
        "each_call": "builds its manager and ends it, graphs and all, as `generate_batch` does",
        "tcb_graphs": NO_EFFECT.get("use_cuda_graph", "used"),
        "contenders": contenders,
    }

    def run(name: str, settings: dict[str, Any], part: int, new_tokens: int) -> float:
        machine.release_memory(device)
        system, _ = _CONTENDERS[name]
        return timed(system, model, prompts[:part], new_tokens, settings)[0]

    part, few = max(2, workload.requests // 4), max(2, workload.new_tokens // 6)
    for contender, (system, graphs) in _CONTENDERS.items():
        candidates = SYSTEMS[system].candidates(model, prompts, workload.new_tokens)
        # the last one takes the least memory
        names = list(candidates)[-1 if small else 0 :]
        choice = contenders[contender] = {"trials": {}, "seconds": []}
        for candidate in names:
            settings = candidates[candidate] | {"use_cuda_graph": graphs}
            # the first call compiles; time for a round of all is left over
            if time.perf_counter() > end - limit / 2 and choice.get("settings"):
                break
            try:
                if candidate == names[0] and not small:
                    run(contender, settings, 2, 2)
                choice["trials"][candidate] = round(run(contender, settings, part, few), 3)
            except Exception as error:
                machine.synchronize(device)
                choice["trials"][candidate] = f"{type(error).__name__}: {str(error)[:300]}"
                continue
            times = {key: s for key, s in choice["trials"].items() if isinstance(s, float)}
            if min(times, key=times.get) == candidate:
                choice["settings"] = settings
        keep(record)
    _take_turns(record, run, workload, end, 1 if small else _ROUNDS, keep)
    return record


def _take_turns(
    record: Record,
    run: Callable[..., float],
    workload: Workload,
    end: float,
    rounds: int,
    keep: Callable[[Record], None],
) -> None:
    """Rounds over all contenders that ran, until time is short. Writes the record."""
    contenders = record["contenders"]
    names = [name for name, choice in contenders.items() if "settings" in choice]
    spent = 0.0
    for turn in range(rounds):
        start = time.perf_counter()
        if turn and spent > _SHARE * (end - start):
            break
        first = turn % max(1, len(names))
        for name in names[first:] + names[:first]:
            choice = contenders[name]
            try:
                seconds = run(name, choice["settings"], workload.requests, workload.new_tokens)
            except Exception as error:
                choice["error"] = f"{type(error).__name__}: {str(error)[:300]}"
                continue
            choice["seconds"].append(round(seconds, 3))
            _sum_up(record, workload)
            keep(record)
        spent = time.perf_counter() - start


def _sum_up(record: Record, workload: Workload) -> None:
    generated, best = workload.requests * workload.new_tokens, {}
    for name, choice in record["contenders"].items():
        if choice["seconds"]:
            speed = round(generated / statistics.median(choice["seconds"]), 1)
            choice["tokens_per_second"] = speed
            system = _CONTENDERS[name][0]
            best[system] = max(speed, best.get(system, 0.0))
    if len(best) == 2:
        record["ratio"] = round(best["tcb"] / best["transformers-cb"], 3)


def faults(record: Record) -> list[str]:
    """Why this package has no speed; what stops a comparator is in its own entry."""
    found = []
    for name, choice in record["contenders"].items():
        errors = [trial for trial in choice["trials"].values() if isinstance(trial, str)]
        errors += [choice["error"]] if "error" in choice else []
        if name.startswith("tcb"):
            found += [f"{name}: {error}" for error in errors]
    return found
