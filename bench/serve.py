"""Serving speed: this package beside transformers' continuous batching and padded `generate`, and
beside vLLM on a CPU, which has a process of its own.

All systems run the same model and prompts, in turn, round by round, so that a slow minute of the
machine hits each. Every request gets exactly the new tokens asked for, or it is an error. Writes
one JSON file. It knows how to measure, and no system's inside.
"""

import argparse
import gc
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.lib.prompts import WORKLOADS, Workload
from bench.lib.results import add_output, describe, store
from bench.lib.systems import SYSTEMS, Prompts, Settings, System, references
from bench.lib.vllm_process import vllm
from bench.models import NAMES, SOURCES, fetch, open_model

# up to so many requests a sweep tries all settings of a system; above, those best at the last trial
_TRIED = 32


def main() -> None:
    """Measure as the command line says, print a table and write the JSON file."""
    arguments = _parse()
    torch.set_num_threads(arguments.threads)
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    model, tokenizer = open_model(arguments.model, dtype, device)
    workload = WORKLOADS[arguments.workload].changed(
        requests=arguments.requests, new_tokens=arguments.new_tokens, length=arguments.length
    )
    content = {
        "kind": "sweep" if arguments.sweep else "serve",
        "model": arguments.model,
        "dtype": arguments.dtype,
        "workload": {"name": arguments.workload, **asdict(workload)},
    }
    with ExitStack() as stack:
        if arguments.vllm_python:
            process = vllm(
                arguments.vllm_python, fetch(arguments.model), arguments.dtype, arguments.threads
            )
            SYSTEMS["vllm"] = stack.enter_context(process)
            arguments.systems = [*arguments.systems, "vllm"]
        if arguments.sweep:
            del content["workload"]["requests"]
            content |= sweep(model, tokenizer, workload, arguments)
        else:
            content |= compare(model, tokenizer, workload, arguments)
    content["environment"] = describe(device)
    which = "-sweep" if arguments.sweep else workload.requests
    default = f"serve-{device.type}-{arguments.model}-{arguments.workload}{which}"
    print(sweep_table(content) if arguments.sweep else table(content))
    print(store(arguments.name or default, content, arguments.out))


def compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    workload: Workload,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Return the speed of each system on one workload, and how many requests agree."""
    prompts = workload.prompts(tokenizer, model.config.vocab_size)
    new_tokens = workload.new_tokens
    settings, trials = {}, {}
    for name in arguments.systems:
        settings[name], trials[name] = best_settings(name, model, prompts, new_tokens)
    measured = measure(model, prompts, new_tokens, settings, arguments.rounds)
    expected = None
    if not arguments.no_reference:
        expected = references(model, arguments.model, prompts, new_tokens, _say_progress)
    systems = {
        name: summary(seconds, tokens, expected, settings[name], trials[name])
        for name, (seconds, tokens) in measured.items()
    }
    return {
        "prompt_tokens": sum(map(len, prompts)),
        "rounds": arguments.rounds,
        "systems": systems,
    }


def sweep(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    workload: Workload,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Return the speed of each system at each number of requests.

    Rounds go over all numbers; none begins that `--minutes` would not let end.
    """
    end = time.perf_counter() + 60 * arguments.minutes
    new_tokens, points = workload.new_tokens, []
    best: dict[str, str] = {}
    for count in sorted(arguments.sweep):
        prompts = replace(workload, requests=count).prompts(tokenizer, model.config.vocab_size)
        systems: dict[str, dict[str, Any]] = {}
        for name in arguments.systems:
            if count <= _TRIED or name not in best:
                settings, trials = best_settings(name, model, prompts, new_tokens)
                best[name] = min(trials, key=trials.get)
            else:
                settings = SYSTEMS[name].candidates(model, prompts, new_tokens)[best[name]]
            systems[name] = {"settings": settings, "chosen": best[name], "seconds": []}
        points.append({"requests": count, "prompts": prompts, "systems": systems})
    rounds = 0
    while rounds < arguments.rounds:
        begin = time.perf_counter()
        for point in points:
            settings = {name: kept["settings"] for name, kept in point["systems"].items()}
            measured = measure(model, point["prompts"], new_tokens, settings, 1, first=rounds)
            for name, (seconds, _) in measured.items():
                point["systems"][name]["seconds"] += [round(value, 3) for value in seconds]
        rounds += 1
        if 2 * time.perf_counter() - begin > end:
            break
    for point in points:
        point["prompt_tokens"] = sum(map(len, point.pop("prompts")))
        for kept in point["systems"].values():
            generated = point["requests"] * new_tokens
            kept["tokens_per_second"] = round(generated / statistics.median(kept["seconds"]), 2)
    return {"rounds": rounds, "points": points}


def best_settings(
    system: str,
    model: PreTrainedModel,
    prompts: Prompts,
    new_tokens: int,
    most: int | None = None,
) -> tuple[Settings, dict[str, float]]:
    """Run each candidate once, or the first `most`, and return the fastest, and the seconds of all:
    the warm-up too.
    """
    candidates = dict(islice(SYSTEMS[system].candidates(model, prompts, new_tokens).items(), most))
    SYSTEMS[system].run(model, prompts[:2], 2, next(iter(candidates.values())))
    seconds = {}
    for name, settings in candidates.items():
        seconds[name], _ = timed(system, model, prompts, new_tokens, settings)
        print(f"{system}, {name}: {seconds[name]:.1f} s", file=sys.stderr, flush=True)
    return candidates[min(seconds, key=seconds.get)], seconds


def measure(
    model: PreTrainedModel,
    prompts: Prompts,
    new_tokens: int,
    settings: dict[str, Settings],
    rounds: int,
    first: int = 0,
) -> dict[str, tuple[list[float], list[list[int]]]]:
    """Return for each system its seconds, one a round, and its tokens in the last round.

    Each round begins with another system, so that none is always the one after the same neighbour;
    the first one with system number `first`.
    """
    names = list(settings)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    tokens = {}
    for turn in range(rounds):
        begin = (first + turn) % len(names)
        for name in names[begin:] + names[:begin]:
            spent, tokens[name] = timed(name, model, prompts, new_tokens, settings[name])
            seconds[name].append(spent)
            print(f"round {turn + 1}, {name}: {spent:.2f} s", file=sys.stderr, flush=True)
    return {name: (seconds[name], tokens[name]) for name in names}


def timed(
    system: str,
    model: PreTrainedModel,
    prompts: Prompts,
    new_tokens: int,
    settings: Settings,
    called: System | None = None,
) -> tuple[float, list[list[int]]]:
    """Return the seconds of one call and its tokens, which must be as many as were asked for.

    called  what is called for a system that is none of `SYSTEMS`
    """
    run = (called or SYSTEMS[system]).run
    gc.collect()
    start = time.perf_counter()
    tokens = run(model, prompts, new_tokens, settings)
    seconds = time.perf_counter() - start
    lengths = {len(row) for row in tokens}
    assert len(tokens) == len(prompts), f"{system}: {len(tokens)} results of {len(prompts)}"
    assert lengths == {new_tokens}, f"{system}: {lengths} new tokens, {new_tokens} were asked for"
    return seconds, tokens


def summary(
    seconds: list[float],
    tokens: list[list[int]],
    expected: list[list[int]] | None,
    settings: Settings,
    trials: dict[str, float],
) -> dict[str, Any]:
    """Return what is kept of one system: its median speed, and how many requests agree."""
    generated = sum(map(len, tokens))
    agree = None
    if expected is not None:
        agree = sum(a == b for a, b in zip(tokens, expected, strict=True))
    return {
        "tokens_per_second": round(generated / statistics.median(seconds), 2),
        "seconds": [round(value, 3) for value in seconds],
        "equal_to_generate_alone": agree,
        "settings": settings,
        "trials": {name: round(value, 3) for name, value in trials.items()},
    }


def table(content: dict[str, Any]) -> str:
    """Return the result as lines of text: tokens a second, ratio to the first system, agreement."""
    systems = content["systems"]
    first = next(iter(systems))
    requests = content["workload"]["requests"]
    lines = [f"{'system':18}{'tokens/s':>10}   times as fast is {first:17} equal to generate alone"]
    for name, result in systems.items():
        ratio = systems[first]["tokens_per_second"] / result["tokens_per_second"]
        agree = result["equal_to_generate_alone"]
        shown = "not compared" if agree is None else f"{agree} of {requests}"
        lines.append(f"{name:18}{result['tokens_per_second']:10.1f}{ratio:17.2f}{'':21}{shown}")
    return "\n".join(lines)


def sweep_table(content: dict[str, Any]) -> str:
    """Return tokens a second as lines of text: a row a number of requests, a column a system."""
    names = list(content["points"][0]["systems"])
    lines = [f"{'requests':>9}" + "".join(f"{name:>18}" for name in names)]
    for point in content["points"]:
        speeds = [point["systems"][name]["tokens_per_second"] for name in names]
        lines.append(f"{point['requests']:9}" + "".join(f"{speed:18.1f}" for speed in speeds))
    return "\n".join(lines)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", choices=NAMES, default="smollm2", metavar="NAME", help=", ".join(NAMES))
    add("--workload", choices=sorted(WORKLOADS), default="chat")
    add("--requests", type=int, help="prompts, if not those of the workload")
    add("--sweep", type=_counts, metavar="N,N,...", help="measure each of these numbers of prompts")
    add("--minutes", type=float, default=8.0, help="of a sweep: no round begins that ends later")
    add("--length", type=int, help="tokens of a prompt, about, if not those of the workload")
    add("--new-tokens", type=int, help="new tokens of each, if not those of the workload")
    add("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS), metavar="NAME")
    add("--vllm-python", type=Path, metavar="PATH", help="vLLM too: python of its environment")
    add("--rounds", type=int, default=3)
    add("--threads", type=int, default=torch.get_num_threads())
    add("--device", default="cpu")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--no-reference", action="store_true", help="do not compare with generate, one by one")
    add_output(parser)
    arguments = parser.parse_args()
    if arguments.vllm_python and (arguments.device != "cpu" or arguments.model not in SOURCES):
        parser.error(f"--vllm-python: needs --device cpu and a model of {sorted(SOURCES)}")
    return arguments


def _counts(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _say_progress(done: int, total: int) -> None:
    end = "\n" if done == total else ""
    print(f"\rgenerate alone: {done}/{total}", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
