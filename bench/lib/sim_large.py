"""How many machines 10,000 users of a 70B model need, and what the policies change.

A user asks, reads the answer, thinks, and asks again. The users are dealt evenly to machines that
know nothing of each other, so one of them is simulated. Arrivals do not wait for answers: what
comes is what so many users ask of a machine that is fast enough.
"""

from dataclasses import asdict
from typing import Any

import torch

from bench.lib.arrivals import poisson
from bench.lib.results import describe, store
from bench.lib.sim_cost import SHAPES, h200
from bench.simulate import simulate

USERS, THINK = 10_000, 60.0
PROMPT, NEW, PREFIXES, SHARED = 600, 250, 4, 800
MACHINES = (1, 2, 4, 8, 16, 32, 64)
# seconds of arrivals that are simulated, and most requests
SECONDS, MOST = 120.0, 3000
POLICIES: dict[str, dict[str, Any]] = {
    "fifo": {},
    "prefill_first": {"scheduler_type": "prefill_first"},
    "fifo, no prefix sharing": {"allow_block_sharing": False},
    "fifo, batches of 1,024 tokens": {"max_batch_tokens": 1024},
}


def main() -> None:
    """Simulate every number of machines under every policy, print and store."""
    result = large()
    for policy, rows in result["policies"].items():
        for row in rows:
            print(
                f"{row['machines']:3d} machines, {policy}: {row['tokens_per_second']:.0f} tokens/s,"
                f" first token p95 {row['time_to_first_token']['p95']:.2f} s, between tokens p95 "
                f"{1e3 * row['time_between_tokens']['p95']:.0f} ms, "
                f"{row['preemptions']} preemptions, prefix hits {row['prefix_hits']:.0%}"
            )
    print(f"stored in {store('simulation-large', result)}")


def large(users: int = USERS, machines: tuple[int, ...] = MACHINES) -> dict[str, Any]:
    """What one of the machines does, for every number of them and every policy."""
    shape, machine = SHAPES["llama-70b"], h200(8)
    policies: dict[str, list[dict[str, Any]]] = {}
    for policy, settings in POLICIES.items():
        for count in machines:
            rate = users / THINK / count
            asked = poisson(
                rate,
                int(min(MOST, max(50, rate * SECONDS))),
                PROMPT,
                NEW,
                prefixes=PREFIXES,
                shared=SHARED,
            )
            found = simulate(shape, machine, asked, page_size=16, **settings)
            row = {"machines": count, "rate": rate, **found}
            policies.setdefault(policy, []).append(row)
    return {
        "kind": "simulation",
        "environment": describe(torch.device("cpu")),
        "model": shape.name,
        "machine": asdict(machine),
        "users": users,
        "think_seconds": THINK,
        "workload": {"prompt": PROMPT, "new": NEW, "prefixes": PREFIXES, "shared": SHARED},
        "policies": policies,
    }
