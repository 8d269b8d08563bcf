"""What other busy processes cost: this package beside transformers' continuous batching.

    python -m bench.busy --busy 0 1 2 4

Both serve the same prompts in one process, in turn, with each number of busy processes beside it,
round by round. Writes one JSON file.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from bench.lib.prompts import WORKLOADS
from bench.lib.results import add_output, describe, store
from bench.models import NAMES, open_model
from bench.serve import best_settings, timed

SYSTEMS = ("tcb", "transformers-cb")


def main() -> None:
    """Measure as the command line says, print a table and write the JSON file."""
    arguments = _parse()
    torch.set_num_threads(arguments.threads)
    device = torch.device("cpu")
    model, tokenizer = open_model(arguments.model, torch.float32, device)
    workload = WORKLOADS[arguments.workload].changed(
        requests=arguments.requests, new_tokens=arguments.new_tokens
    )
    prompts = workload.prompts(tokenizer, model.config.vocab_size)
    settings = {
        name: best_settings(name, model, prompts, workload.new_tokens)[0] for name in SYSTEMS
    }
    seconds: dict[int, dict[str, list[float]]] = {
        count: {name: [] for name in SYSTEMS} for count in arguments.busy
    }
    for turn in range(arguments.rounds):
        for count, kept in seconds.items():
            for name in SYSTEMS[turn % 2 :] + SYSTEMS[: turn % 2]:
                with busy_processes(count):
                    spent, _ = timed(name, model, prompts, workload.new_tokens, settings[name])
                kept[name].append(round(spent, 3))
                print(f"{count} busy, {name}: {spent:.2f} s", file=sys.stderr, flush=True)
    generated = len(prompts) * workload.new_tokens
    content = {
        "kind": "busy",
        "model": arguments.model,
        "workload": {"name": arguments.workload, **asdict(workload)},
        "settings": settings,
        "points": [
            {"busy": count, "seconds": kept, "tokens_per_second": _speeds(kept, generated)}
            for count, kept in seconds.items()
        ],
        "environment": describe(device),
    }
    for point in content["points"]:
        print(f"{point['busy']} busy: {point['tokens_per_second']}")
    print(store(arguments.name or f"busy-cpu-{arguments.model}", content, arguments.out))


@contextmanager
def busy_processes(count: int) -> Iterator[list[subprocess.Popen]]:
    """So many processes that compute without end run beside what is done within."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _speeds(seconds: dict[str, list[float]], generated: int) -> dict[str, Any]:
    return {name: round(generated / statistics.median(spent), 2) for name, spent in seconds.items()}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", choices=NAMES, default="smollm2", metavar="NAME", help=", ".join(NAMES))
    add("--workload", choices=sorted(WORKLOADS), default="chat")
    add("--requests", type=int, default=8)
    add("--new-tokens", type=int, default=16)
    add("--busy", type=int, nargs="+", default=[0, 1, 2, 4], metavar="N", help="busy processes")
    add("--rounds", type=int, default=3)
    add("--threads", type=int, default=torch.get_num_threads())
    add_output(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
