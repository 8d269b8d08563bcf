"""Host cost of one decode step without a model: plan, pack, apply, land.

    python -m bench.planning [--folder bench/results] [--quick]

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

import torch

from bench.environment import RESULTS, describe, store
from tcb.planning.blocks import ROOT_HASH, hash_page
from tcb.planning.groups import LayerGroup, first_visible_page
from tcb.planning.limits import Limits
from tcb.planning.packing import pack_batch
from tcb.planning.request import Request
from tcb.planning.schedule import plan_batch
from tcb.planning.state import SampledTokens, State, apply_plan, apply_results, new_state
from tcb.planning.state import Sequence as EngineSequence

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
    """Sequences of half of `context` to `context` tokens that decode.

    They read one common prefix, so that a long context costs little to make.
    """
    groups = tuple(LayerGroup((g,), window, 1, 64, 64) for g, window in enumerate(windows))
    num_pages = context // page_size
    own_pages = num_sequences * len(groups) * (num_steps // page_size + 3)
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
    blocks = iter(reversed(state.pool.free))
    prefix = [[next(blocks) for _ in range(num_pages)] for _ in groups]
    block_hashes = [ROOT_HASH]
    for _ in range(num_pages):
        block_hashes.append(hash_page(block_hashes[-1], [1] * page_size))
    for g, table in enumerate(prefix):
        for block, block_hash in zip(table, block_hashes[1:], strict=True):
            state.pool.take(block)
            state.pool.register(block, g, block_hash)
    for seq_id in range(num_sequences):
        # lengths differ, as in real life: else the ends of all lists would share few cache sets
        pages = num_pages - seq_id * 31 % (num_pages // 2 + 1)
        _add_sequence(
            state, seq_id, [table[:pages] for table in prefix], block_hashes[1 : pages + 1]
        )
    return state, limits


def _add_sequence(state, seq_id, prefix, block_hashes):
    page_size = state.page_size
    # a prompt fills the prefix, if there is one, own tokens some places of a page; one is pending
    full = len(block_hashes) * page_size
    prompt = (1,) * max(full, 1)
    computed = max(full + seq_id % page_size, 1)
    first = [first_visible_page(computed, g.window, page_size) for g in state.groups]
    tables = [pages[low:] for pages, low in zip(prefix, first, strict=True)]
    for table in tables:
        for block in table:
            state.pool.share(block)
    if computed % page_size:
        for table in tables:
            table.append(state.pool.free[-1])
            state.pool.take(table[-1])
    state.running[seq_id] = EngineSequence(
        seq_id=seq_id,
        request=Request(f"req_{seq_id}", prompt, max_new_tokens=10**6),
        num_prompt=len(prompt),
        limit=10**6,
        first=first,
        tables=tables,
        generated=[seq_id] * (computed + 1 - len(prompt)),
        computed=computed,
        room=-(-computed // page_size) * page_size,
        row=state.free_rows.pop(),
        block_hashes=block_hashes.copy(),
        num_hashed=len(block_hashes),
        hash_next_at=full + page_size - len(prompt),
    )
    state.seq_ids[f"req_{seq_id}"] = seq_id
    state.next_seq_id = seq_id + 1


def time_step(state: State, limits: Limits, token: int) -> tuple[float, ...]:
    """CPU milliseconds of each stage of one step."""
    start = thread_time()
    plan = plan_batch(state, limits)
    planned = thread_time()
    pack_batch(state, plan)
    packed = thread_time()
    apply_plan(state, plan)
    applied = thread_time()
    results = SampledTokens([token] * len(plan.sample_seq_ids))
    ready = thread_time()
    apply_results(state, plan, results)
    landed = thread_time()
    assert plan.num_tokens == limits.max_requests, "not everybody decodes"
    seconds = (planned - start, packed - planned, applied - packed, landed - ready)
    return tuple(1e3 * stage for stage in seconds)


def measure(kind: str, page_size: int, num_sequences: int, num_steps: int) -> list[dict]:
    """One case for each context."""
    # every list grows once before, as it has in a sequence that came this far by itself
    warm_up = page_size + 1
    total = warm_up + num_steps
    states = [
        decoding_state(KINDS[kind], page_size, num_sequences, context, total)
        for context in CONTEXTS
    ]
    # what was made here is no garbage, but a collection would visit all of it again and again
    gc.collect()
    gc.freeze()
    steps = [[time_step(*state, step) for state in states] for step in range(total)]
    gc.unfreeze()
    case = {"groups": kind, "page_size": page_size, "sequences": num_sequences}
    return [
        {**case, "context": context, "steps": num_steps, **summary(times)}
        for context, times in zip(CONTEXTS, zip(*steps[warm_up:], strict=True), strict=True)
    ]


def summary(steps: Sequence[tuple[float, ...]]) -> dict:
    """Milliseconds of a step, and of each of its stages."""
    sums = [sum(stages) for stages in steps]
    stages = dict(zip(STAGES, zip(*steps, strict=True), strict=True))
    return {
        "median_ms": round(median(sums), 4),
        "mean_ms": round(mean(sums), 4),
        "least_ms": round(min(sums), 4),
        "stages_median_ms": {name: round(median(times), 4) for name, times in stages.items()},
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
    store("planning", content, arguments.folder)


if __name__ == "__main__":
    main()
