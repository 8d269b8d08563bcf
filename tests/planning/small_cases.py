"""What small cases are built from: a state, requests, and turns of the loop without a device.

It knows nothing of the toy device: tokens are made up.
"""

from collections.abc import Iterable
from typing import Any

from tcb.planning.limits import Limits
from tcb.planning.plan import BatchPlan, Chunk
from tcb.planning.request import Request
from tcb.planning.schedule import plan_batch
from tcb.planning.state import (
    SampledTokens,
    Sequence,
    State,
    StepOutput,
    apply_arrival,
    apply_plan,
    apply_results,
    new_state,
)
from tests.planning.pool_check import check_pool
from tests.planning.workloads import layer_group, make_limits

TOKEN = 5


def make_state(windows: Iterable[int | None] = (None,), **changes: Any) -> tuple[State, Limits]:
    """An empty state with a group for each window."""
    limits = make_limits(**changes)
    groups = tuple(layer_group(window, layer) for layer, window in enumerate(windows))
    return new_state(groups, limits), limits


def arrive(
    state: State, name: str, length: int | Iterable[int], max_new_tokens: int = 8, **fields: Any
) -> Sequence:
    """Queue a request; a length stands for a prompt that no other name has."""
    if isinstance(length, int):
        # names of other letters share no page
        length = [1000 * (ord(name[0]) - 64) + i for i in range(length)]
    return apply_arrival(state, Request(name, tuple(length), max_new_tokens, **fields))


def launch(state: State, limits: Limits) -> BatchPlan:
    """Plan and apply."""
    plan = plan_batch(state, limits)
    apply_plan(state, plan)
    check_pool(state.pool)
    return plan


def land(state: State, plan: BatchPlan, token: int = TOKEN) -> StepOutput:
    """Bring one token home for each sample."""
    return apply_results(state, plan, SampledTokens([token] * len(plan.sample_seq_ids)))


def turn(state: State, limits: Limits, count: int = 1) -> BatchPlan:
    """So many turns of the loop at depth 0; the last one's plan."""
    for _ in range(count):
        plan = launch(state, limits)
        land(state, plan)
    return plan


def spans(plan: BatchPlan) -> list[tuple[int, int, int]]:
    """(seq_id, start, count) of the chunks."""
    return [(chunk.seq_id, chunk.start, chunk.count) for chunk in plan.chunks]


def only(plan: BatchPlan) -> Chunk:
    """The one chunk of a plan without decodes."""
    assert not plan.decodes
    [chunk] = plan.chunks
    return chunk
