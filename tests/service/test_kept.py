"""What a kept manager cannot see of a model, or sees late, never meets its cached prefixes."""

import types

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import GenerationConfig

import tcb
from tests.support.families import FAMILIES
from tests.support.reference import alone, prompts_of

NEW = 6
PROMPTS = prompts_of((40, 23))
OPTIONS = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=None)
SETTINGS = tcb.ContinuousBatchingConfig(page_size=8, num_blocks=60)
# what code that a user adds to a model may read, and no look at the model finds
STRENGTH = {"now": 0.0}


class Steering:
    """A direction, and its strength in an attribute of a plain object."""

    def __init__(self, model):
        generator = torch.Generator().manual_seed(1)
        self.direction = torch.randn(model.config.hidden_size, generator=generator)
        self.strength = 0.0

    def __call__(self, module, args, output):
        return output + self.strength * self.direction


class Shift(nn.Module):
    """A parametrization that adds what lies in a global to its weight."""

    def forward(self, weight):
        return weight + STRENGTH["now"]


def hook_of_an_object(model):
    steering = Steering(model)
    model.model.layers[0].mlp.register_forward_hook(steering)
    return lambda strength: setattr(steering, "strength", strength)


def hook_of_a_dictionary(model):
    steering = Steering(model)
    model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, output: output + STRENGTH["now"] * steering.direction
    )
    return lambda strength: STRENGTH.update(now=strength)


def hook_of_a_tensor(model):
    steering, factor = Steering(model), torch.zeros(1)
    model.model.layers[0].mlp.register_forward_pre_hook(
        lambda module, args: (args[0] + factor * steering.direction,)
    )
    return factor.fill_


def patched_forward(model):
    def forward(self, states):
        return type(self).forward(self, states) * (1 + STRENGTH["now"])

    mlp = model.model.layers[0].mlp
    mlp.forward = types.MethodType(forward, mlp)
    return lambda strength: STRENGTH.update(now=strength)


def parametrization(model):
    parametrize.register_parametrization(model.model.layers[0].mlp.up_proj, "weight", Shift())
    return lambda strength: STRENGTH.update(now=strength)


@pytest.fixture
def model():
    STRENGTH["now"] = 0.0
    made = FAMILIES["llama"]()
    yield made
    tcb.destroy_cached_continuous_batching_manager(made)


def call(model, prompts=PROMPTS, **more):
    outputs = tcb.generate_batch(
        model, prompts, OPTIONS, SETTINGS, persistent_manager=True, **more
    ).values()
    assert [output.error for output in outputs] == [None] * len(prompts)
    return [output.generated_tokens for output in outputs]


def expected(model):
    return [alone(model, prompt, NEW) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "kind",
    [hook_of_an_object, hook_of_a_dictionary, hook_of_a_tensor, patched_forward, parametrization],
)
def test_code_that_reads_elsewhere_meets_no_prefix_of_an_earlier_call(model, kind):
    steer, seen = kind(model), []
    for strength in (0.0, 0.7, 2.0):
        steer(strength)
        seen.append(call(model))
        assert seen[-1] == expected(model)
    assert seen[0] != seen[2]


def test_a_strength_that_changes_in_a_pause(model):
    steer = hook_of_a_dictionary(model)
    with tcb.continuous_batching_context_manager(
        model, OPTIONS, continuous_batching_config=SETTINGS
    ) as manager:
        for strength in (0.0, 2.0):
            with manager.pause():
                steer(strength)
            ids = manager.add_requests(PROMPTS)
            tokens = [manager.get_result(i, timeout=60).generated_tokens for i in ids]
            assert tokens == expected(model)


def test_models_without_such_code_keep_their_prefixes(model):
    call(model)
    hits = []
    engine = model._cached_continuous_batching_manager.batch_processor.engine
    step = engine._runner.launch
    engine._runner.launch = lambda packed, *more: (
        hits.append(packed.num_tokens) or step(packed, *more)
    )
    call(model)
    # two prompts of 40 and 23 tokens, of which whole pages of 8 are found
    assert hits[0] < 23


def test_prefixes_are_forgotten_by_hand(model):
    """A class's own forward that reads a global: nothing on the model shows it."""
    plain = type(model.model.layers[0].mlp)

    class Scaled(plain):
        def forward(self, states):
            return super().forward(states) * (1 + STRENGTH["now"])

    model.model.layers[0].mlp.__class__ = Scaled
    assert call(model) == expected(model)
    STRENGTH["now"] = 2.0
    model._cached_continuous_batching_manager.reset_prefix_cache()
    assert call(model) == expected(model)
    with tcb.continuous_batching_context_manager(
        model, OPTIONS, continuous_batching_config=SETTINGS
    ) as manager:
        for STRENGTH["now"] in (0.0, 1.0):
            manager.reset_prefix_cache()
            outputs = [manager.get_result(i, 60) for i in manager.add_requests(PROMPTS)]
            assert [output.generated_tokens for output in outputs] == expected(model)


def resize(model):
    model.resize_token_embeddings(220, mean_resizing=False)


def cast(model):
    model.to(torch.float16).to(torch.bfloat16)


def turn(model):
    model.config.rope_parameters["rope_theta"] = 50.0
    model.model.rotary_emb.__init__(model.config)


def drop_layer(model):
    del model.model.layers[-1]
    model.config.num_hidden_layers -= 1


@pytest.mark.parametrize("change", [resize, cast, turn, drop_layer])
def test_a_model_of_another_shape_is_served_by_the_very_next_call(model, change):
    before = call(model)
    change(model)
    assert call(model) == expected(model)
    if change is resize:
        assert len(call(model, [[210, 5, 219]])[0]) == NEW
    assert len(before) == len(PROMPTS)
