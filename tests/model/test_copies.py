"""Prepared copies of weights never outlive what they were made of, and give their memory back."""

import gc
import weakref

import pytest
import torch
from torch import nn

from tcb.model import linear
from tcb.model.linear import Product
from tcb.model.prepared import prepare
from tcb.model.products import AS_IT_LIES, PREPARED_COPY, Choice
from tests.support.families import FAMILIES
from tests.support.reference import alone, new_engine, prompts_of, serve

PROMPTS = prompts_of((5, 30, 12), seed=8)
NEW = 8
SETTINGS = {"page_size": 8, "num_blocks": 64, "max_batch_tokens": 32}


@pytest.fixture
def model(monkeypatch):
    """All of its linear layers multiply with copies."""
    choice = Choice((1,), (PREPARED_COPY,), (AS_IT_LIES,))
    monkeypatch.setattr(linear, "choose", lambda weight: choice)
    monkeypatch.setattr(linear, "_LARGE", 1)
    return FAMILIES["llama"]()


def copies(twin) -> list[torch.Tensor | None]:
    forwards = (module.__dict__.get("forward") for module in twin.modules())
    return [forward._copy for forward in forwards if isinstance(forward, Product)]


def write(model):
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(-1)


def write_data(model):
    model.model.layers[1].self_attn.q_proj.weight.data.mul_(-1)


def load_assigned(model):
    state = {name: -value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def optimize(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    tokens = torch.tensor([PROMPTS[0]])
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def merge(model):
    layer = model.model.layers[0].self_attn.v_proj
    layer.weight.data += torch.randn(len(layer.weight), 2) @ torch.randn(2, layer.in_features)


@pytest.mark.parametrize("change", [write, write_data, load_assigned, optimize, merge])
def test_weights_that_change_are_seen_and_old_copies_freed(model, change):
    engine = new_engine(model, **SETTINGS)
    before = [alone(model, prompt, NEW) for prompt in PROMPTS]
    assert serve(engine, PROMPTS, NEW) == before
    old = prepare(model).twin
    held = [weakref.ref(copy) for copy in copies(old)]
    assert len(held) > 10
    change(model)
    now = [alone(model, prompt, NEW) for prompt in PROMPTS]
    assert now != before, "a change that shows"
    assert engine.refresh_weights()
    gc.collect()
    assert all(ref() is None for ref in held)
    # the twin that is in nobody's use any more has no copies, the new one has all
    assert not any(copy is not None for copy in copies(old))
    assert not any(copy is None for copy in copies(prepare(model).twin))
    assert serve(engine, PROMPTS, NEW) == now


def test_copies_are_freed_with_the_model(model):
    made = FAMILIES["llama"]()
    held = [weakref.ref(copy) for copy in copies(prepare(made).twin)]
    assert len(held) > 10
    del made
    gc.collect()
    assert all(ref() is None for ref in held)


def test_an_embedding_that_the_head_shares_stays_as_it_is(model):
    model.lm_head.weight = model.model.embed_tokens.weight
    twin = prepare(model).twin
    assert isinstance(twin.lm_head.__dict__["forward"], Product)
    assert type(twin.model.embed_tokens) is nn.Embedding
    assert twin.model.embed_tokens.weight is model.lm_head.weight
    tokens = [alone(model, prompt, NEW) for prompt in PROMPTS]
    assert serve(new_engine(model, **SETTINGS), PROMPTS, NEW) == tokens
