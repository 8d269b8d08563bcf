"""What a batch asks of the attention kernels: one work list a group, and chunks only if bits
must not depend on the batch.
"""

import logging
from functools import partial

import pytest

from tcb.device import attention
from tcb.kernels.dispatch import is_interpreting
from tests.conftest import INTERPRETED
from tests.support.families import FAMILIES
from tests.support.reference import alone, new_engine, prompts_of, serve

LOGGER = "ContinuousBatchingLogger"
# two chunks of the longer prompt, then batches of single tokens
SETTINGS = {"page_size": 8, "num_blocks": 16, "max_batch_tokens": 16}
PROMPTS = prompts_of([21, 3], seed=6)


@pytest.fixture
def on_triton(monkeypatch):
    """Triton's interpreter for all operations."""
    if not INTERPRETED:
        pytest.skip("runs in the interpreter only: an accelerator or TRITON_INTERPRET is set")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert is_interpreting()


@pytest.fixture
def calls(monkeypatch):
    """How often each operation of attention was called."""
    counts = {}

    def count(name, operation, *args, **options):
        counts[name] = counts.get(name, 0) + 1
        return operation(*args, **options)

    for name in ("list_work", "paged_attention", "paged_decode"):
        monkeypatch.setattr(attention, name, partial(count, name, getattr(attention, name)))
    return counts


@pytest.mark.parametrize("deterministic", ["off", "batch"])
def test_layers_of_a_group_share_a_list(deterministic, on_triton, calls, caplog):
    # all layers see everything: one group
    model = FAMILIES["llama"]()
    expected = [alone(model, prompt, 3) for prompt in PROMPTS]
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        engine = new_engine(model, deterministic=deterministic, **SETTINGS)
        assert serve(engine, PROMPTS, 3) == expected
    assert caplog.messages == []
    groups, layers = len(engine.state.groups), len(engine.layers.layers)
    assert groups < layers
    assert calls["list_work"] * layers == calls["paged_attention"] * groups
    assert ("paged_decode" in calls) == (deterministic == "off")


def test_torch_operations_are_not_deterministic_and_say_so(monkeypatch, calls, caplog):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = FAMILIES["llama"]()
    expected = [alone(model, prompt, 3) for prompt in PROMPTS]
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        engine = new_engine(model, deterministic="batch", **SETTINGS)
        assert serve(engine, PROMPTS, 3) == expected
    (message,) = caplog.messages
    assert message.startswith("deterministic has no effect: torch operations attend on a CPU")
    assert calls["paged_decode"] > 0
