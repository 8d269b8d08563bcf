"""A twin shares the weights of its original and nothing that calling it may change."""

import functools
import types

import pytest
import torch
from torch import nn

from tcb.model.attention_hook import ATTENTION
from tcb.model.probe import probe
from tcb.model.structure import structure
from tcb.model.twin import set_attention, twin, unwrap
from tests.model.test_attention_hook import generate_alone, prompts, run
from tests.support.families import FAMILIES, SIZES, build


@pytest.fixture
def model():
    return FAMILIES["llama"]()


def bound_to(value, modules) -> bool:
    """Whether a method or partial still reaches one of `modules`."""
    owners = [getattr(value, "__self__", None), *getattr(value, "args", ())]
    return any(owner is module for owner in owners for module in modules)


@pytest.mark.parametrize("family", ["llama", "gemma3n", "gpt_oss", "gpt2"])
def test_every_weight_is_the_same_object(family):
    model = FAMILIES[family]()
    clone = twin(model)
    theirs, ours = dict(model.named_parameters()), dict(clone.named_parameters())
    assert theirs.keys() == ours.keys()
    assert all(theirs[name] is ours[name] for name in theirs)
    assert [b.data_ptr() for b in model.buffers()] == [b.data_ptr() for b in clone.buffers()]
    assert not set(map(id, model.modules())) & set(map(id, clone.modules()))
    assert model.state_dict().keys() == clone.state_dict().keys()


def test_weights_moved_cast_or_replaced_are_seen(model):
    clone, before = twin(model), structure(model)
    model.to(torch.float64)
    assert {parameter.dtype for parameter in clone.parameters()} == {torch.float64}
    model.lm_head.weight = nn.Parameter(torch.ones_like(model.lm_head.weight))
    assert clone.lm_head.weight is model.lm_head.weight
    assert before.matches(model)


def test_configurations_are_copies_that_name_our_attention(model):
    before = model.config.to_dict(), model.config._attn_implementation
    clone = twin(model)
    configs = {id(module.config): module.config for module in clone.modules() if has_config(module)}
    originals = {id(module.config) for module in model.modules() if has_config(module)}
    assert len(configs) == len(originals)
    assert not configs.keys() & originals
    assert all(config._attn_implementation == ATTENTION for config in configs.values())
    assert (model.config.to_dict(), model.config._attn_implementation) == before
    set_attention(clone, "sdpa")
    assert clone.model.layers[0].self_attn.config._attn_implementation == "sdpa"


def has_config(module) -> bool:
    return "config" in module.__dict__


def test_configurations_inside_configurations_are_copied():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    sizes = {**SIZES, "layer_types": ["full_attention"], "num_hidden_layers": 1}
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    config = Gemma3Config(
        text_config=sizes, vision_config={**vision, "intermediate_size": 16}, mm_tokens_per_image=4
    )
    model = Gemma3ForConditionalGeneration(config).eval()
    clone = twin(model)
    assert clone.config.text_config is clone.model.language_model.config
    assert clone.config.text_config is not model.config.text_config
    assert clone.config.text_config._attn_implementation == ATTENTION
    assert model.config.text_config._attn_implementation == "sdpa"


def test_train_mode_is_each_its_own(model):
    model.train()
    clone = twin(model)
    assert not any(module.training for module in clone.modules())
    assert all(module.training for module in model.modules())
    model.eval()
    clone.train()
    assert not any(module.training for module in model.modules())


def test_checkpointing_is_off_in_the_twin(model):
    model.gradient_checkpointing_enable()
    model.train()
    clone = twin(model)
    flags = [module.gradient_checkpointing for module in clone.model.layers]
    assert not any(flags)
    assert all(module.gradient_checkpointing for module in model.model.layers)
    assert run(model) == generate_alone(model.eval(), prompts())


def test_hooks_of_the_original_run_and_new_ones_stay_apart(model):
    seen = []
    model.model.layers[1].register_forward_hook(lambda module, *_: seen.append(module))
    clone = twin(model)
    probe(model, clone)
    assert seen and all(module is clone.model.layers[1] for module in seen)
    clone.model.register_forward_hook(lambda *_: None)
    assert not model.model._forward_hooks


def test_a_forward_wrapped_as_accelerate_does_is_bound_to_the_clone(model):
    calls = []

    def wrap(module):
        def new_forward(module, *args, **kwargs):
            calls.append(module)
            return module._old_forward(*args, **kwargs)

        module._old_forward = module.forward
        wrapped = functools.partial(new_forward, module)
        module.forward = functools.update_wrapper(wrapped, module._old_forward)

    expected = generate_alone(model, prompts())
    for module in list(model.modules()):
        wrap(module)
    clone = twin(model)
    originals = list(model.modules())
    for module in clone.modules():
        assert not any(bound_to(value, originals) for value in module.__dict__.values())
        assert not bound_to(module.__dict__["forward"].__wrapped__, originals)
    calls.clear()
    assert run(model) == expected
    assert calls and not any(any(call is module for module in originals) for call in calls)


def test_a_forward_that_closes_over_the_original_is_rebuilt(model):
    expected = generate_alone(model, prompts())
    inner = model.model.forward

    def closing(*args, **kwargs):
        return inner(*args, **kwargs)

    model.model.forward = closing
    model.forward = types.MethodType(
        lambda self, **kwargs: type(self).forward(self, **kwargs), model
    )
    clone = twin(model)
    cells = [cell.cell_contents for cell in clone.model.forward.__closure__]
    assert [cell.__self__ for cell in cells] == [clone.model]
    assert clone.forward.__self__ is clone
    assert inner.__self__ is model.model
    assert run(model) == expected


def test_references_between_modules_are_remapped(model):
    model.direct = None
    model.__dict__["direct"] = model.model
    model.listed = [model.lm_head, 3]
    model.named = {"first": model.model.layers[0], "other": (model.lm_head,)}
    model.plain = {"scale": 2.0}
    clone = twin(model)
    assert clone.direct is clone.model
    assert clone.listed[0] is clone.lm_head
    assert clone.named["first"] is clone.model.layers[0]
    assert clone.named["other"][0] is clone.lm_head
    # what refers to no module stays the same object, so that changes inside it are seen
    assert clone.plain is model.plain


def test_a_module_in_two_places_is_one_in_the_clone(model):
    model.again = model.model.layers[0]
    clone = twin(model)
    assert clone.again is clone.model.layers[0]
    assert clone.lm_head.weight is model.lm_head.weight


def test_compiled_wrappers_are_left_out(model):
    compiled = torch.compile(model)
    model.model = torch.compile(model.model)
    model.lm_head.compile()
    clone = twin(compiled)
    assert unwrap(compiled) is model
    assert type(clone) is type(model)
    assert type(clone.model).__name__ == "LlamaModel"
    assert clone.lm_head._compiled_call_impl is None
    assert structure(compiled).matches(model) and structure(model).matches(compiled)
    assert probe(compiled, clone).layers


def test_rotary_embeddings_that_rewrite_their_frequencies_write_their_own():
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    sizes = {**SIZES, "max_position_embeddings": 16, "head_dim": 8}
    model = build("LlamaForCausalLM", **sizes, rope_parameters=scaling)
    clone, made = twin(model), structure(model)
    before = model.model.rotary_emb.inv_freq.clone()
    clone.model.rotary_emb(torch.zeros(1), torch.arange(64)[None])
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
    assert not torch.equal(clone.model.rotary_emb.inv_freq, before)
    assert made.matches(model)


def test_the_original_generates_as_before_while_a_twin_lives(model):
    expected = generate_alone(model, prompts())
    clone = twin(model)
    facts = probe(model, clone)
    assert generate_alone(model, prompts()) == expected
    assert facts.layers and clone is not model


def test_outputs_that_the_original_was_told_to_keep_are_not_kept(model):
    model.config.output_hidden_states = True
    model.config.return_dict = False
    clone = twin(model)
    probe(model, clone)
    assert not any(module._forward_hooks for module in model.modules())
    assert model.config.output_hidden_states is True


class Wrapped:
    """A forward in an object, as mixed precision keeps it: it holds the bound method it calls."""

    def __init__(self, forward):
        self.model_forward = forward

    def __call__(self, *args, **kwargs):
        return self.model_forward(*args, **kwargs)


@pytest.mark.parametrize("is_patched", [False, True])
def test_an_object_around_a_bound_forward_calls_the_clones(model, is_patched):
    expected = generate_alone(model, prompts())
    if is_patched:
        original = model.forward
        model.forward = types.MethodType(lambda self, *a, **k: original(*a, **k), model)
    model.forward = wrapped = Wrapped(model.forward)
    clone = twin(model)
    assert clone.forward is not wrapped and model.forward is wrapped
    assert run(model) == expected


def test_an_object_that_holds_itself_is_cloned_once(model):
    wrapped = Wrapped(model.forward)
    wrapped.self = wrapped
    model.forward = wrapped
    assert run(model) == generate_alone(model, prompts())


def test_an_object_that_refers_to_nothing_of_the_model_is_shared(model):
    wrapped = Wrapped(len)
    model.counter = wrapped
    assert twin(model).counter is wrapped
