"""What is kept on a model between two calls is used again, never when stale, and hurts nobody."""

import gc
import pickle
import types
import weakref
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import GenerationConfig

import tcb
from tcb.model import prepared
from tcb.model.prepared import prepare
from tcb.model.twin import PREPARED
from tests.support.families import FAMILIES, REFUSED
from tests.support.reference import alone, new_engine, prompts_of, serve

PROMPTS = prompts_of((5, 30, 12), seed=8)
NEW = 8
SETTINGS = {"page_size": 8, "num_blocks": 64, "max_batch_tokens": 32}


def call(model, **options):
    """The tokens of one call."""
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    outputs = tcb.generate_batch(model, PROMPTS, config, SETTINGS, **options)
    assert all(output.error is None for output in outputs.values())
    return [output.generated_tokens for output in outputs.values()]


def expected(model):
    was_training = model.training
    tokens = [alone(model.eval(), prompt, NEW) for prompt in PROMPTS]
    model.train(was_training)
    return tokens


@pytest.fixture
def model():
    return FAMILIES["llama"]()


@pytest.fixture
def probes(monkeypatch):
    """The models that were probed, in order."""
    seen = []
    probe = prepared.probe
    monkeypatch.setattr(prepared, "probe", lambda *args: seen.append(args[0]) or probe(*args))
    return seen


class LowRank(nn.Module):
    """A linear layer and its adapter, as PEFT puts one around it."""

    def __init__(self, base):
        super().__init__()
        self.base_layer, self.scaling = base, {"default": 1.5}
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x)) * self.scaling["default"]


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def write(model):
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(-1)


def write_data(model):
    model.model.layers[1].self_attn.q_proj.weight.data.mul_(-1)


def load(model):
    model.load_state_dict({name: -value for name, value in model.state_dict().items()})


def load_assigned(model):
    state = {name: -value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def resize(model):
    model.resize_token_embeddings(300)
    model.lm_head.weight.data[250] = model.lm_head.weight.data.sum(0)


def adapt(model):
    attention = model.model.layers[0].self_attn
    attention.v_proj = LowRank(attention.v_proj)


def adapt_and_merge(model):
    attention = model.model.layers[0].self_attn
    low = LowRank(attention.v_proj)
    low.base_layer.weight.data += 1.5 * low.up.weight.data @ low.down.weight.data
    attention.v_proj = low.base_layer


def hook(model):
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: -output)


def swap(model):
    model.model.layers[1].mlp = FAMILIES["llama"]().model.layers[2].mlp


def rotate(model):
    config = deepcopy(model.config)
    config.rope_parameters["rope_theta"] = 50.0
    model.model.rotary_emb = type(model.model.rotary_emb)(config)


def turn_in_place(model):
    model.model.rotary_emb.inv_freq.mul_(0.3)


def drop_a_layer(model):
    del model.model.layers[2]


def scale(model):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 3


def train(model):
    model.train()


def round_weights(model):
    model.to(torch.bfloat16).to(torch.float32)


def patch(model):
    inner = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: -inner(x)


def patch_as_method(model):
    mlp = model.model.layers[1].mlp
    mlp.forward = types.MethodType(lambda self, x: -type(self).forward(self, x), mlp)


def parametrized(model):
    parametrize.register_parametrization(model.model.layers[0].mlp.up_proj, "weight", Doubled())


def narrow(model):
    model.config.sliding_window = 5


def cap_attention(model):
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = 0.5


def cap_logits(model):
    model.config.final_logit_softcapping = 0.01


CHANGES = [
    *[("llama", change) for change in (write, write_data, load, load_assigned, resize, adapt)],
    *[("llama", change) for change in (adapt_and_merge, hook, swap, rotate, turn_in_place)],
    *[("llama", change) for change in (drop_a_layer, scale, train, round_weights, patch)],
    *[("llama", change) for change in (patch_as_method, parametrized)],
    ("mistral", narrow),
    ("gemma2", cap_attention),
    ("gemma2", cap_logits),
]


@pytest.mark.parametrize(
    ("family", "change"), CHANGES, ids=lambda part: getattr(part, "__name__", part)
)
def test_a_change_between_two_calls_is_answered_by(family, change):
    model = FAMILIES[family]()
    before = expected(model)
    assert call(model) == before
    change(model)
    now = expected(model)
    if change not in (train, round_weights, cap_logits):
        assert now != before, "a change that shows"
    assert call(model) == now
    assert model.training == (change is train)


def test_a_model_cast_to_another_dtype_is_served_in_it(model):
    call(model)
    model.to(torch.bfloat16)
    assert prepare(model).layers.dtype == torch.bfloat16
    assert call(model) == call(deepcopy(model))


def test_what_a_hook_closes_over_may_change(model):
    """A dictionary that refers to a module, of which the twin has its own; and a name set anew."""
    state, sign = {"module": model.lm_head, "sign": 1}, model.lm_head

    def flip(module, args, output):
        return output * state["sign"] * (1 if sign is module else -1)

    model.lm_head.register_forward_hook(flip)
    tokens = call(model)
    assert tokens == expected(model)
    state["sign"] = -1
    assert call(model) == expected(model) != tokens
    sign = model.model
    assert call(model) == expected(model) == tokens


def test_a_hook_that_notes_what_it_sees_leaves_the_twin_in_use(model, probes):
    seen, count = [], 0

    def note(module, args, output):
        nonlocal count
        seen.append(output.shape)
        count += 1

    model.lm_head.register_forward_hook(note)
    call(model, persistent_manager=True)
    before = len(seen)
    assert before == count > 0
    call(model, persistent_manager=True)
    assert len(seen) > before and probes == [model]
    tcb.destroy_cached_continuous_batching_manager(model)


def test_a_second_call_neither_clones_nor_probes(model, probes):
    first = prepare(model)
    tokens = call(model)
    assert call(model) == tokens
    assert prepare(model) is first
    model.train()
    assert call(model) == tokens
    assert probes == [model]


def test_a_kept_manager_and_a_call_share_what_is_prepared(model, probes):
    tokens = call(model, persistent_manager=True)
    assert call(model, persistent_manager=True) == tokens
    assert probes == [model]
    write(model)
    assert call(model, persistent_manager=True) == expected(model) != tokens
    assert probes == [model, model]
    tcb.destroy_cached_continuous_batching_manager(model)


def test_nothing_about_the_model_shows_it(model, tmp_path):
    plain = FAMILIES["llama"]()
    call(model)
    assert vars(model).keys() - vars(plain).keys() == {PREPARED}
    assert repr(model) == repr(plain)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [
        name for name, _ in plain.named_modules()
    ]
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert PREPARED not in vars(again)
    assert call(again) == call(model)


@pytest.mark.parametrize("copy", [deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_prepared_anew(model, copy):
    tokens = call(model)
    other = copy(model)
    assert vars(other)[PREPARED] is None
    assert call(other) == tokens
    write(other)
    assert call(other) == expected(other) != tokens
    assert call(model) == tokens


def test_no_weight_is_copied(model):
    clone = prepare(model).twin
    assert list(map(id, clone.parameters())) == list(map(id, model.parameters()))


def test_weights_on_an_offloading_hook_are_not_copied(model):
    accelerate = pytest.importorskip("accelerate")
    tokens = expected(model)
    accelerate.cpu_offload(model, execution_device="cpu")
    clone = prepare(model).twin
    assert clone.lm_head._hf_hook.weights_map is model.lm_head._hf_hook.weights_map
    for _ in range(2):
        assert serve(new_engine(model, **SETTINGS), PROMPTS, NEW) == tokens
    assert prepare(model).twin is clone


def test_a_model_that_is_dropped_is_freed_with_its_weights(model):
    model = FAMILIES["llama"]()
    call(model)
    call(model)
    gone = weakref.ref(model), weakref.ref(model.lm_head.weight)
    gc.collect()
    gc.disable()
    try:
        del model
        assert [ref() for ref in gone] == [None, None], "freed at once, without a collection"
    finally:
        gc.enable()


def test_a_model_that_a_hook_refers_to_is_collected(model):
    model = FAMILIES["llama"]()
    model.forward = types.MethodType(type(model).forward, model)
    call(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_nothing_is_kept_of_a_model_that_is_refused():
    model = REFUSED["llama4"]()
    with pytest.raises(ValueError, match="cannot be served"):
        prepare(model)
    assert PREPARED not in vars(model)


def test_a_model_that_can_no_longer_be_served_is_refused(model):
    call(model)
    model.model.layers[2].self_attn = model.model.layers[1].self_attn
    with pytest.raises(ValueError, match="of a module that was called before"):
        call(model)
    assert PREPARED not in vars(model)


@pytest.mark.parametrize(
    "mode", [torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)]
)
def test_what_the_callers_thread_is_set_to_has_no_part_in_it(model, mode):
    tokens = expected(model)
    with mode():
        engine = new_engine(model, **SETTINGS)
        assert engine.layers.dtype == torch.float32
        assert serve(engine, PROMPTS, NEW) == tokens
    assert serve(new_engine(model, **SETTINGS), PROMPTS, NEW) == tokens


class Adapter(nn.Module):
    """Around a model, as PEFT wraps it."""

    def __init__(self, inner, **active):
        super().__init__()
        self.inner, self.peft_config = inner, {}
        self.active_peft_config = types.SimpleNamespace(**active)

    def get_base_model(self):
        return self.inner


def test_a_wrapped_model_is_prepared_as_what_it_wraps(model):
    inside = prepare(model)
    assert prepare(Adapter(model, is_prompt_learning=False)) is inside
    assert prepare(torch.compile(model)) is inside


def test_an_adapter_that_puts_tokens_before_the_prompt_is_refused(model):
    with pytest.raises(ValueError, match="accepted: adapters that live in the layers"):
        prepare(Adapter(model, is_prompt_learning=True))
