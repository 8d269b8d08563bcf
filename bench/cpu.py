"""The table of a CPU: this package beside transformers, vLLM and the bare model, row by row.

    python -m bench.cpu --vllm-python FOLDER/bin/python

Each row is a number of prompts of one length in fp32 or bf16. The systems of a row take turns; the
median counts. Rows of one dtype share their model. Writes one JSON file, after every row.
"""

import argparse
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from bench.bare import bare_twin, run_bare
from bench.lib.prompts import WORKLOADS
from bench.lib.results import add_output, describe, store
from bench.lib.systems import SYSTEMS, System
from bench.lib.vllm_process import vllm
from bench.models import SOURCES, fetch, open_model
from bench.serve import timed

# prompts and about how many tokens each has
ROWS = ((32, 16), (128, 16), (16, 256))
DTYPES = ("float32", "bfloat16")
# of transformers' settings, those that were the best on these rows
_TRANSFORMERS = "cut, 512 a batch"


def main() -> None:
    """Measure as the command line says, print a table and write the JSON file."""
    arguments = _parse()
    torch.set_num_threads(arguments.threads)
    end = time.perf_counter() + 60 * arguments.minutes
    rows: list[dict[str, Any]] = []
    todo = len(DTYPES) * len(ROWS)
    content = {
        "kind": "cpu",
        "model": arguments.model,
        "new_tokens": arguments.new_tokens,
        "rows": rows,
        "environment": describe(torch.device("cpu")),
    }
    for dtype in arguments.dtypes:
        model, tokenizer = open_model(arguments.model, getattr(torch, dtype), "cpu")
        with ExitStack() as stack:
            systems = {name: SYSTEMS[name] for name in ("tcb", "transformers-cb")}
            if arguments.vllm_python:
                process = vllm(
                    arguments.vllm_python, fetch(arguments.model), dtype, arguments.threads
                )
                systems["vllm"] = stack.enter_context(process)
            for count, length in ROWS:
                workload = WORKLOADS["chat"].changed(
                    requests=count, new_tokens=arguments.new_tokens, length=length
                )
                prompts = workload.prompts(tokenizer, model.config.vocab_size)
                limit = (end - time.perf_counter()) / todo
                row = {"dtype": dtype, "requests": count, "prompt_tokens": sum(map(len, prompts))}
                rows.append(row | measure(systems, model, prompts, arguments, limit))
                todo -= 1
                print(line(rows[-1]), flush=True)
                path = store(arguments.name or f"cpu-{arguments.model}", content, arguments.out)
    print(path)


def measure(
    systems: dict[str, System],
    model: Any,
    prompts: list[list[int]],
    arguments: argparse.Namespace,
    limit: float,
) -> dict[str, Any]:
    """Seconds of each system, and tokens a second by the median; at most `--rounds` rounds, and
    none begins that `limit` seconds would not let end.
    """
    new_tokens, begin = arguments.new_tokens, time.perf_counter()
    settings: dict[str, dict[str, Any]] = {name: {} for name in systems}
    found = SYSTEMS["transformers-cb"].candidates(model, prompts, new_tokens)
    settings["transformers-cb"] = found[_TRANSFORMERS]
    for name, system in systems.items():
        # all prompts: vLLM's first long batch takes twice the time of the next
        system.run(model, prompts, 2, settings[name])
    seconds: dict[str, list[float]] = {name: [] for name in (*systems, "bare")}
    clone = bare_twin(model)
    run_bare(clone, prompts, 2)
    names = list(seconds)
    for turn in range(arguments.rounds):
        start = time.perf_counter()
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if name == "bare":
                at = time.perf_counter()
                run_bare(clone, prompts, new_tokens)
                spent = time.perf_counter() - at
            else:
                spent, _ = timed(name, model, prompts, new_tokens, settings[name], systems[name])
            seconds[name].append(spent)
            print(f"round {turn + 1}, {name}: {spent:.2f} s", file=sys.stderr, flush=True)
        now = time.perf_counter()
        if now - begin + (now - start) > limit:
            break
    generated = len(prompts) * new_tokens
    speeds = {
        name: round(generated / statistics.median(spent), 1) for name, spent in seconds.items()
    }
    shown = {name: [round(value, 3) for value in spent] for name, spent in seconds.items()}
    return {"tokens_per_second": speeds, "seconds": shown, "settings": settings}


def line(row: dict[str, Any]) -> str:
    """One row as text."""
    speeds = "  ".join(f"{name} {speed:.1f}" for name, speed in row["tokens_per_second"].items())
    return f"{row['dtype']}, {row['requests']} prompts, {row['prompt_tokens']} tokens: {speeds}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", choices=sorted(SOURCES), default="smollm2")
    add("--vllm-python", type=Path, metavar="PATH", help="python of an environment with vLLM")
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    add("--new-tokens", type=int, default=32)
    add("--rounds", type=int, default=3)
    add("--minutes", type=float, default=12.0, help="about how long all rows may take")
    add("--threads", type=int, default=torch.get_num_threads())
    add_output(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
