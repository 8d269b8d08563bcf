"""What the batches did is counted, and rates are those of the latest busy seconds."""

import pytest

from tcb.planning.meter import Meter
from tcb.planning.plan import BatchPlan, Chunk, Preemption


def chunk(count, *, start=0, samples=True, shared=((),)):
    return Chunk(1, 0, start, count, samples, (0,), shared, ((),))


def test_a_plan_is_counted():
    meter = Meter()
    chunks = (
        chunk(16, samples=False),
        chunk(1, start=32),
        chunk(1, samples=False),
        chunk(5, start=8, shared=((3,), ())),
    )
    meter.add(BatchPlan((7, 8), chunks, (Preemption(5, "recompute"),)))
    assert (meter.steps, meter.decode_tokens, meter.prefill_tokens) == (1, 3, 22)
    assert (meter.prefix_hit_tokens, meter.preemptions) == (8, 1)


def test_rates_are_those_of_the_latest_seconds():
    meter = Meter()
    assert meter.rates() == (0.0, 0.0, 0.0)
    for _ in range(200):
        meter.add(BatchPlan((1,), (), ()))
        meter.add_seconds(0.5)
    assert meter.rates() == pytest.approx((0.0, 2.0, 0.5))
    for _ in range(40):
        meter.add(BatchPlan((), (chunk(8, samples=False),), ()))
        meter.add_seconds(0.25)
    assert meter.rates() == pytest.approx((32.0, 0.0, 0.25), rel=0.25)
    assert meter.busy_seconds == 110.0 and meter.steps == 240
