"""What the process is set to (default dtype and device, flags) changes no token of any call."""

from contextlib import contextmanager

import pytest
import torch
from transformers import GenerationConfig

import tcb
from tcb.model.prepared import forget
from tests.support.families import FAMILIES
from tests.support.reference import prompts_of

# plain attention on a CPU, attention with sinks and windows, experts
KINDS = ["llama", "gpt_oss", "mixtral"]
PROMPTS = prompts_of((5, 23, 1, 40))
SETTINGS = tcb.ContinuousBatchingConfig(page_size=8, num_blocks=60, max_batch_tokens=32, seed=3)
OPTIONS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 30, "top_p": 0.9},
    "processed": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}


@contextmanager
def restored(read, write, value):
    """`value` is set inside, and what was read before is set again."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def default_dtype(dtype):
    return restored(torch.get_default_dtype, torch.set_default_dtype, dtype)


def default_device(name):
    return restored(lambda: None, torch.set_default_device, name)


def deterministic():
    read, write = torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
    return restored(read, write, True)


STATES = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: default_device("meta"),
    "in_meta": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "anomaly": torch.autograd.detect_anomaly,
}


@pytest.fixture(scope="module")
def models():
    made = {family: FAMILIES[family]() for family in KINDS}
    return made, {
        (family, kind): tokens(model, kind) for family, model in made.items() for kind in OPTIONS
    }


def tokens(model, kind):
    options = GenerationConfig(max_new_tokens=8, eos_token_id=None, **OPTIONS[kind])
    outputs = tcb.generate_batch(model, PROMPTS, options, SETTINGS).values()
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    return [output.generated_tokens for output in outputs]


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("family", KINDS)
def test_no_token_changes(models, family, state, kind):
    made, expected = models
    with STATES[state]():
        # what is prepared in this state, and what was prepared before
        forget(made[family])
        assert tokens(made[family], kind) == expected[family, kind]
        assert tokens(made[family], kind) == expected[family, kind]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_thread_changes_the_default_dtype_in_the_middle(models, dtype):
    made, expected = models
    options = GenerationConfig(max_new_tokens=8, eos_token_id=None, do_sample=False)
    with tcb.continuous_batching_context_manager(
        made["llama"], generation_config=options, continuous_batching_config=SETTINGS
    ) as manager:
        first = manager.add_request(PROMPTS[0], max_new_tokens=1)
        ids = manager.add_requests(PROMPTS)
        # the others have begun when the first ends
        manager.get_result(first, timeout=60)
        with default_dtype(dtype):
            outputs = [manager.get_result(i, timeout=60) for i in ids]
    assert [output.generated_tokens for output in outputs] == expected["llama", "greedy"]
