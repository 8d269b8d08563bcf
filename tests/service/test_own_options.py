"""Options of one request that need its history are honoured, or refused by name."""

import pytest
from transformers import GenerationConfig

import tcb
from tests.support.calling import NEW, SMALL
from tests.support.families import FAMILIES

PROMPT = [5, 9, 31]


@pytest.fixture(scope="module")
def model():
    return FAMILIES["llama"]()


def tokens_of(model, options, settings=None, **own):
    """The tokens of a request with options of its own, in a manager with these."""
    config = GenerationConfig(max_new_tokens=NEW, **options)
    manager = tcb.init_continuous_batching(model, config, SMALL | (settings or {}))
    manager.start()
    try:
        return manager.get_result(manager.add_request(PROMPT, seed=1, **own)).generated_tokens
    finally:
        manager.stop(hard_stop=True)


def test_a_request_that_samples_in_a_greedy_manager_is_drawn_as_if_all_did(model):
    typical = {"typical_p": 0.05}
    wanted = tokens_of(model, typical | {"do_sample": True})
    assert tokens_of(model, typical, do_sample=True) == wanted
    assert tokens_of(model, {}, do_sample=True) != wanted


def test_what_needs_a_history_is_refused_while_batches_fly(model):
    with pytest.raises(ValueError, match=r"history.*accepted: use_async_batching=False"):
        tokens_of(model, {"typical_p": 0.05}, {"use_async_batching": True}, do_sample=True)
