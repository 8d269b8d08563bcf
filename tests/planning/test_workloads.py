"""Workloads that hypothesis draws, so that one that fails comes out small; always the same ones."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.planning.serving import Server
from tests.planning.workloads import random_workload


@settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.randoms(use_true_random=False))
def test_drawn_workloads(rng):
    Server(random_workload(rng)).run()
