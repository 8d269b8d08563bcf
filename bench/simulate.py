"""Serve requests on a machine that is not here: the package's own planner, and a model of devices.

    python -m bench.simulate --model llama-70b --rate 20
    python -m bench.simulate --trace requests.jsonl --policy prefill_first
    python -m bench.simulate --large
    python -m bench.simulate --check

Plans, pools, prefixes and preemptions are those that would be served: `plan_batch` and `apply_*`
run unchanged. What a batch takes on the device is computed (`bench.lib.sim_cost`). `--large` asks
how many machines 10,000 users need and stores what it finds; `--check` compares the simulation with
a model that is served here.
"""

import argparse
import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from operator import sub
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

from bench.lib.arrivals import Asked, from_trace, poisson, tokens_of
from bench.lib.sim_cost import SHAPES, Cost, Machine, Shape, h200
from tcb.planning.config import ContinuousBatchingConfig
from tcb.planning.limits import Facts, Limits, resolve
from tcb.planning.plan import BatchPlan, SampledTokens
from tcb.planning.request import Request
from tcb.planning.schedule import plan_batch
from tcb.planning.state import (
    State,
    apply_arrival,
    apply_plan,
    apply_results,
    new_state,
)

# bytes of a device that weights and cache do not get: context, workspace, fragments
_RESERVED = 4e9


def limits_for(shape: Shape, machine: Machine, config: ContinuousBatchingConfig) -> Limits:
    """What the package would resolve for this model on this machine."""
    weights = shape.weights * shape.bytes / machine.devices
    free = machine.memory - weights - _RESERVED
    if free <= 0:
        raise ValueError(
            f"{shape.name} needs {weights:.3g} bytes on each device of {machine.name}, which has "
            f"{machine.memory:.3g}; accepted: more devices, or smaller models"
        )
    facts = Facts(
        device_type="cuda" if machine.overlaps else "cpu",
        free_memory=int(free),
        host_memory=None,
        element_size=shape.bytes,
        groups=shape.groups(machine.devices),
        hidden_size=shape.hidden,
        vocab_size=shape.vocab,
        intermediate_size=shape.intermediate // machine.devices,
    )
    return resolve(config, facts)


class Simulation:
    """One machine that serves requests, step by step, on a clock of its own.

    now, steps             seconds and batches so far
    preemptions            how often a running sequence gave its blocks back
    computed, hit          positions computed, and positions of prompts read from the prefix cache
    """

    def __init__(self, cost: Cost, limits: Limits) -> None:
        self.cost, self.limits = cost, limits
        groups = cost.shape.groups(cost.machine.devices)
        self.state: State = new_state(groups, limits)
        self.now, self.steps = 0.0, 0
        self.preemptions = self.computed = self.hit = 0
        self._flying: deque[tuple[BatchPlan, float]] = deque()
        self._device_free = 0.0
        self._token_times: dict[str, list[float]] = {}

    def run(self, asked: Sequence[Asked]) -> dict[str, Any]:
        """Serve all of them to the end; what came out, in seconds and tokens."""
        since, place, state = perf_counter(), 0, self.state
        prompts = tokens_of(asked)
        while place < len(asked) or state.waiting or state.running or self._flying:
            while place < len(asked) and asked[place].time <= self.now:
                new, prompt = asked[place].new, next(prompts)
                apply_arrival(state, Request(str(place), prompt, new, record_timestamps=True))
                place += 1
            plan = plan_batch(state, self.limits)
            if not plan.is_empty:
                self._launch(plan)
            if self._flying and (len(self._flying) > self.limits.depth or plan.is_empty):
                self._land()
            elif plan.is_empty and place < len(asked):
                self.now = max(self.now, asked[place].time)
        return self._summary(asked, perf_counter() - since)

    def _launch(self, plan: BatchPlan) -> None:
        state, batch = self.state, self.cost.batch()
        running = state.running
        batch.decode([running[seq_id].computed for seq_id in plan.decodes])
        for chunk in plan.chunks:
            batch.read(chunk.start, chunk.count, chunk.samples)
            sequence = state.waiting.get(chunk.seq_id)
            if sequence is not None and chunk.start > sequence.computed:
                self.hit += chunk.start - sequence.computed
        self.preemptions += len(plan.preemptions)
        self.computed += batch.tokens
        apply_plan(state, plan, self.now)
        self._device_free = max(self._device_free, self.now) + self.cost.seconds(batch)
        self._flying.append((plan, self._device_free))
        self.steps += 1

    def _land(self) -> None:
        plan, done = self._flying.popleft()
        self.now = max(self.now, done)
        tokens = SampledTokens([0] * len(plan.sample_seq_ids))
        for sequence in apply_results(self.state, plan, tokens, self.now).finished:
            if sequence.error is not None:
                raise ValueError(f"request {sequence.request.id}: {sequence.error}")
            self._token_times[sequence.request.id] = sequence.timestamps

    def _summary(self, asked: Sequence[Asked], wall: float) -> dict[str, Any]:
        first, between = [], []
        for i, item in enumerate(asked):
            times = self._token_times[str(i)]
            first.append(times[0] - item.time)
            between += map(sub, times[1:], times)
        generated = sum(map(len, self._token_times.values()))
        prompts = sum(item.prompt for item in asked)
        return {
            "requests": len(asked),
            "seconds": self.now,
            "tokens_per_second": generated / self.now,
            "prompt_tokens": prompts,
            "new_tokens": generated,
            "time_to_first_token": _quantiles(first),
            "time_between_tokens": _quantiles(between),
            "steps": self.steps,
            "preemptions": self.preemptions,
            "prefix_hits": self.hit / prompts,
            "recomputed": self.computed + self.hit - (prompts + generated - len(asked)),
            "wall_seconds": wall,
            "requests_per_wall_second": len(asked) / wall,
        }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    found = {f"p{q}": ordered[min(len(ordered) - 1, len(ordered) * q // 100)] for q in (50, 95, 99)}
    return {"mean": fmean(ordered), **found}


def simulate(
    shape: Shape, machine: Machine, asked: Sequence[Asked], **settings: Any
) -> dict[str, Any]:
    """What a machine makes of these requests with these settings of the package."""
    config = ContinuousBatchingConfig(**settings)
    limits = limits_for(shape, machine, config)
    result = Simulation(Cost(shape, machine), limits).run(asked)
    return {"limits": asdict(limits), **result}


def _parse(arguments: Iterable[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="llama-70b")
    parser.add_argument("--devices", type=int, default=8, help="H200s that hold the model")
    parser.add_argument("--trace", type=Path, help="JSON lines: time, prompt, new")
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--prompt", type=int, default=1000, help="mean tokens of a prompt")
    parser.add_argument("--new", type=int, default=250, help="mean tokens of an answer")
    parser.add_argument("--prefixes", type=int, default=0, help="system prompts there are")
    parser.add_argument("--shared", type=int, default=0, help="tokens of a system prompt")
    parser.add_argument("--policy", choices=("fifo", "prefill_first"), default="fifo")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--large", action="store_true", help="70B, 10,000 users, 1 to 64 machines")
    parser.add_argument("--check", action="store_true", help="compare with a model served here")
    return parser.parse_args(arguments)


def main() -> None:
    """Print what a machine makes of the requests, as JSON."""
    given = _parse()
    if given.large:
        from bench.lib import sim_large

        sim_large.main()
        return
    if given.check:
        from bench.lib import sim_check

        sim_check.main()
        return
    if given.trace is not None:
        asked = from_trace(given.trace)
    else:
        lengths = {"prefixes": given.prefixes, "shared": given.shared}
        asked = poisson(given.rate, given.requests, given.prompt, given.new, **lengths)
    machine = h200(given.devices)
    found = simulate(
        SHAPES[given.model],
        machine,
        asked,
        page_size=given.page_size,
        scheduler_type=given.policy,
    )
    print(json.dumps({"model": given.model, "machine": asdict(machine), **found}, indent=1))


if __name__ == "__main__":
    main()
