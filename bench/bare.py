"""How far generation is from the bare model: `generate_batch` beside its forward passes alone.

The bare model computes what no scheduler can spare: every prompt token once, then one batch of all
requests for each further token, with attention left out (each token sees itself only) and no cache,
plan or sampling. Both take turns in one process. Writes one JSON file. It knows no other system.
"""

import argparse
import statistics
import time
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import PreTrainedModel

from bench.lib.prompts import WORKLOADS
from bench.lib.results import RESULTS, describe, store
from bench.lib.systems import Prompts, run_tcb
from bench.models import NAMES, open_model
from tcb.model.attention_hook import call_model
from tcb.model.linear import use_fast_products
from tcb.model.recording import RECORD, Recording, register_recording
from tcb.model.twin import set_attention, twin

# prompt tokens of one pass, as in `generate_batch` on a CPU
CHUNK = 1024


def main() -> None:
    """Measure as the command line says, print both speeds and write the JSON file."""
    arguments = _parse()
    torch.set_num_threads(arguments.threads)
    device = torch.device("cpu")
    model, tokenizer = open_model(arguments.model, torch.float32, device)
    workload = WORKLOADS[arguments.workload].changed(requests=arguments.requests)
    prompts = workload.prompts(tokenizer, model.config.vocab_size)
    seconds: dict[str, list[float]] = {"tcb": [], "bare": []}
    clone = bare_twin(model)
    for turn in range(arguments.rounds + 1):
        for name in seconds:
            start = time.perf_counter()
            if name == "tcb":
                run_tcb(model, prompts, workload.new_tokens, {})
            else:
                run_bare(clone, prompts, workload.new_tokens)
            if turn:
                seconds[name].append(round(time.perf_counter() - start, 3))
    tokens = workload.requests * workload.new_tokens
    speeds = {name: round(tokens / statistics.median(spent), 2) for name, spent in seconds.items()}
    content = {
        "kind": "bare",
        "model": arguments.model,
        "workload": {"name": arguments.workload, **asdict(workload)},
        "prompt_tokens": sum(map(len, prompts)),
        "tokens_per_second": speeds,
        "seconds": seconds,
        "environment": describe(device),
    }
    print(f"tokens/s: {speeds}, tcb at {speeds['tcb'] / speeds['bare']:.0%} of the bare model")
    name = f"bare-cpu-{arguments.model}-{arguments.workload}{workload.requests}"
    print(store(name, content, arguments.out))


def bare_twin(model: PreTrainedModel) -> PreTrainedModel:
    """A twin whose attention lets each token see itself only, with the products of this package."""
    register_recording()
    clone = twin(model)
    set_attention(clone, RECORD)
    use_fast_products(clone)
    return clone


def run_bare(clone: PreTrainedModel, prompts: Prompts, new_tokens: int) -> None:
    """All forward passes that the prompts and their new tokens need, on a bare twin."""
    left = sum(map(len, prompts))
    while left:
        _forward(clone, min(left, CHUNK), 1)
        left -= min(left, CHUNK)
    for _ in range(new_tokens - 1):
        _forward(clone, len(prompts), len(prompts))


def _forward(clone: torch.nn.Module, tokens: int, samples: int) -> None:
    ids, positions = torch.ones(tokens, dtype=torch.int64), torch.arange(tokens)
    call_model(clone, ids, positions, positions[:samples], Recording(clone))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", choices=NAMES, default="smollm2", metavar="NAME", help=", ".join(NAMES))
    add("--workload", choices=sorted(WORKLOADS), default="chat")
    add("--requests", type=int, help="prompts, if not those of the workload")
    add("--rounds", type=int, default=3)
    add("--threads", type=int, default=torch.get_num_threads())
    add("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
