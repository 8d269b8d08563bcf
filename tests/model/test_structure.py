"""What is changed about a model's modules or configurations is noticed; training is no change."""

import pytest
import torch
from torch import nn

from tcb.model.structure import structure
from tests.model.test_attention_hook import generate_alone, prompts
from tests.support.families import FAMILIES


@pytest.fixture
def model():
    return FAMILIES["llama"]()


def change_child(model):
    model.model.layers[1].mlp = nn.Identity()


def add_child(model):
    model.model.layers[1].self_attn.adapter = nn.Linear(2, 2)


def remove_child(model):
    del model.model.layers[2]


def set_attribute(model):
    model.model.layers[0].self_attn.scaling = 0.3


def set_item(model):
    model.model.layers[0].self_attn.scales["one"] = 0.5


def add_hook(model):
    model.model.register_forward_hook(lambda *_: None)


def wrap_forward(model):
    model.forward = model.forward


def change_class(model):
    model.lm_head.__class__ = type("Other", (nn.Linear,), {})


def parametrize(model):
    nn.utils.parametrize.register_parametrization(model.lm_head, "weight", nn.Identity())


def configure(model):
    model.config.attention_bias = True


def configure_attention(model):
    model.set_attn_implementation("eager")


def configure_rotation(model):
    model.config.rope_parameters["rope_theta"] = 5e5


def add_deep_item(model):
    model.model.layers[0].self_attn.scales["more"][0].append(2.0)


@pytest.mark.parametrize(
    "change",
    [
        change_child,
        add_child,
        remove_child,
        set_attribute,
        set_item,
        add_deep_item,
        add_hook,
        wrap_forward,
        change_class,
        parametrize,
        configure,
        configure_attention,
        configure_rotation,
    ],
)
def test_a_changed_tree_is_noticed(model, change):
    model.model.layers[0].self_attn.scales = {"one": 1.0, "more": ([1.0],)}
    before = structure(model)
    assert before.matches(model)
    change(model)
    assert not before.matches(model)
    assert structure(model).matches(model)


def test_a_class_that_gets_another_forward_is_noticed(model, monkeypatch):
    before = structure(model)
    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", lambda self, x: x)
    assert not before.matches(model)


def test_training_and_generating_leave_a_structure_as_it_was(model):
    before = structure(model)
    model.train()
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.tensor([[3, 4]]), labels=torch.tensor([[3, 4]])).loss.backward()
    optimizer.step()
    model.generation_config.temperature = 0.5
    model.gradient_checkpointing_disable()
    model.eval()
    generate_alone(model, prompts()[:1])
    model.config.use_cache = False
    assert before.matches(model)


def test_another_model_is_another_structure(model):
    assert not structure(model).matches(FAMILIES["llama"]())
