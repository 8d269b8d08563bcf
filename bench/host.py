"""Host cost of one decode step without a model: plan, pack, apply, land.

    python -m bench.host [--folder bench/results] [--quick]

Every sequence decodes one token a step at depth 0. Positions are spread over the page, so that each
step has its share of sequences that enter a new page, and a case runs over at least as many steps
as a page has tokens. Short and long contexts take turns, step by step. Times are CPU time of the
thread, which other programs lengthen less than they lengthen time.
"""

import argparse
import gc
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from time import thread_time
from typing import Any

import torch

from bench.lib.results import RESULTS, describe, store
from tcb.planning.groups import LayerGroup
from tcb.planning.limits import Limits
from tcb.planning.packing import pack_batch
from tcb.planning.request import Request
from tcb.planning.schedule import plan_batch
from tcb.planning.state import (
    SampledTokens,
    State,
    apply_arrival,
    apply_plan,
    apply_results,
    new_state,
)

# smaller than the shortest context, so that pages leave it in every case
WINDOW = 64
KINDS = {"full": (None,), "hybrid": (None, WINDOW, WINDOW)}
CONTEXTS = (100, 100_000)
STAGES = ("plan", "pack", "apply", "land")


def decoding_state(
    windows: tuple[int | None, ...],
    page_size: int,
    num_sequences: int,
    context: int,
    num_steps: int,
) -> tuple[State, Limits]:
    """Sequences of half of `context` to `context` tokens that decode for `num_steps` more.

    Their prompts begin alike, so that the pages of a long context are computed once.
    """
    groups = tuple(LayerGroup((g,), window, 1, 64, 64) for g, window in enumerate(windows))
    num_pages = context // page_size
    own_pages = (num_sequences + 1) * len(groups) * (num_steps // page_size + 4)
    limits = Limits(
        page_size=page_size,
        num_blocks=len(groups) * num_pages + own_pages,
        max_batch_tokens=max(8192, num_sequences),
        max_requests=num_sequences,
        safety_margin=0.0,
        policy="fifo",
        share_prefixes=True,
        depth=0,
        host_blocks=0,
        max_length=context + 4096,
        return_logprobs=False,
    )
    state = new_state(groups, limits)
    whole = (1,) * (num_pages * page_size + 1)
    apply_arrival(state, Request("whole", whole, max_new_tokens=1))
    while state.waiting or state.running:
        time_step(state, limits, 1)
    for i in range(num_sequences):
        # lengths differ, as in real life: else the ends of all lists would share few cache sets
        pages = num_pages - i * 31 % (num_pages // 2 + 1)
        prompt = whole[: pages * page_size] + (2,) * (i % page_size + 1)
        apply_arrival(state, Request(f"req_{i}", prompt, max_new_tokens=10**6))
    while len(state.running) < num_sequences or not _decodes(state):
        time_step(state, limits, 1)
    return state, limits


def _decodes(state: State) -> bool:
    return all(sequence.generated for sequence in state.running.values())


def time_step(state: State, limits: Limits, token: int) -> tuple[float, ...]:
    """CPU seconds of each stage of one step."""
    start = thread_time()
    plan = plan_batch(state, limits)
    planned = thread_time()
    pack_batch(state, plan)
    packed = thread_time()
    apply_plan(state, plan)
    applied = thread_time()
    samples = len(plan.decodes) + sum(chunk.samples for chunk in plan.chunks)
    results = SampledTokens([token] * samples)
    ready = thread_time()
    apply_results(state, plan, results)
    landed = thread_time()
    assert not plan.is_empty, "a step computes nothing"
    return planned - start, packed - planned, applied - packed, landed - ready


def measure(
    kind: str,
    page_size: int,
    num_sequences: int,
    num_steps: int,
    contexts: Sequence[int] = CONTEXTS,
) -> list[dict[str, Any]]:
    """One case for each context."""
    # every list grows once before, as it has in a sequence that came this far by itself
    warm_up = page_size + 1
    total = warm_up + num_steps
    states = [
        decoding_state(KINDS[kind], page_size, num_sequences, context, total)
        for context in contexts
    ]
    # what was made here is no garbage, but a collection would visit all of it again and again
    gc.collect()
    gc.freeze()
    steps = [[time_step(*state, step) for state in states] for step in range(total)]
    gc.unfreeze()
    case = {"groups": kind, "page_size": page_size, "sequences": num_sequences}
    return [
        {**case, "context": context, "steps": num_steps, **summary(times)}
        for context, times in zip(contexts, zip(*steps[warm_up:], strict=True), strict=True)
    ]


def summary(steps: Sequence[tuple[float, ...]]) -> dict[str, Any]:
    """Milliseconds of a step, and of each of its stages."""
    sums = [1e3 * sum(stages) for stages in steps]
    stages = dict(zip(STAGES, zip(*steps, strict=True), strict=True))
    return {
        "median_ms": round(median(sums), 4),
        "mean_ms": round(mean(sums), 4),
        "least_ms": round(min(sums), 4),
        "stages_median_ms": {name: round(1e3 * median(times), 4) for name, times in stages.items()},
    }


def main() -> None:
    """Measure every case and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="256 sequences only")
    arguments = parser.parse_args()
    cases = []
    for kind in KINDS:
        for page_size in (16, 256):
            for num_sequences in (256,) if arguments.quick else (64, 256, 1024):
                for case in measure(kind, page_size, num_sequences, max(128, page_size)):
                    cases.append(case)
                    print(json.dumps(case), flush=True)
    content = {**describe(torch.device("cpu")), "clock": "CPU time of the thread", "cases": cases}
    store("host", content, arguments.folder)


if __name__ == "__main__":
    main()
