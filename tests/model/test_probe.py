"""What a probe reads of a model, and what it refuses by name before anything starts."""

import re

import pytest
import torch
import transformers
from torch import nn
from transformers import AttentionInterface

from tcb.model.attention_hook import ATTENTION, LAYER
from tcb.model.probe import probe
from tcb.model.twin import twin
from tcb.planning.groups import Layer
from tests.support.families import FAMILIES, REFUSED, SIZES, VOCAB, WINDOW, build


def look(model):
    return probe(model, twin(model))


def layer_facts(family):
    facts = look(FAMILIES[family]())
    return facts, [
        (layer.window, layer.kv_heads, layer.dim, layer.value_dim) for layer in facts.layers
    ]


@pytest.mark.parametrize(
    ("family", "expected", "scale", "softcap"),
    [
        ("llama", [(None, 2, 8, 8)] * 3, 8**-0.5, None),
        ("mistral", [(WINDOW, 2, 16, 16)] * 3, 0.25, None),
        (
            "gemma3",
            [(WINDOW, 2, 16, 16), (WINDOW, 2, 16, 16), (None, 2, 16, 16)],
            256**-0.5,
            None,
        ),
        (
            "gemma2",
            [(WINDOW, 2, 16, 16), (None, 2, 16, 16), (WINDOW, 2, 16, 16)],
            10**-0.5,
            4.0,
        ),
        (
            "gpt_oss",
            [(WINDOW, 2, 16, 16), (None, 2, 16, 16), (WINDOW, 2, 16, 16)],
            0.25,
            None,
        ),
        ("deepseek_v3", [(None, 4, 12, 6)] * 3, 12**-0.5, None),
        ("opt", [(None, 4, 12, 12)] * 3, 1.0, None),
    ],
)
def test_what_is_read(family, expected, scale, softcap):
    facts, layers = layer_facts(family)
    count = len(expected)
    assert layers == expected
    assert [layer.layer for layer in facts.layers] == list(range(count))
    assert facts.scales == pytest.approx((scale,) * count)
    assert facts.softcaps == (softcap,) * count
    assert (facts.vocab_size, facts.num_embeddings) == (VOCAB, VOCAB)
    assert (facts.dtype, facts.device) == (torch.float32, torch.device("cpu"))
    assert facts.keeps_logits
    assert isinstance(facts.layers[0], Layer)


@pytest.mark.parametrize(
    ("family", "bound"), [("gpt2", 512), ("opt", 512), ("llama", None), ("gemma3n", None)]
)
def test_positions_that_a_table_holds(family, bound):
    assert look(FAMILIES[family]()).max_positions == bound


class Rotations(nn.Module):
    """Rotary embedding from a table, as GPT-J keeps one."""

    def __init__(self, dim):
        super().__init__()
        self.register_buffer("cos", torch.ones(96, dim))

    def forward(self, states, position_ids):
        return self.cos[position_ids], self.cos[position_ids, :]


def test_positions_that_a_table_of_rotations_holds():
    model = FAMILIES["llama"]()
    model.model.rotary_emb = Rotations(8)
    assert look(model).max_positions == 96


@pytest.mark.parametrize(
    ("scaling", "bound"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, 512),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 64,
            },
            64,
        ),
        ({"rope_type": "linear", "factor": 2.0}, None),
        ({"rope_type": "yarn", "factor": 2.0}, None),
    ],
)
def test_positions_up_to_which_a_token_rotates_by_its_own_alone(scaling, bound):
    model = build("LlamaForCausalLM", **SIZES, rope_parameters={"rope_theta": 1e4, **scaling})
    assert look(model).max_positions == bound


REASONS = {
    "bloom": "does not call transformers' attention interface",
    "falcon": "does not call transformers' attention interface",
    "mamba": "does not call transformers' attention interface",
    "t5": "is an encoder-decoder model",
    "stablelm": "StableLmAttention got no batch: the keyword is dropped",
    "llama4": "states full attention, but its mask shows something else, such as chunks",
    "jamba": "layer types ['linear_attention'] are not full or sliding",
    "qwen3_next": "layer types ['linear_attention'] are not full or sliding",
    "lfm2": "are not full or sliding",
    "falcon_h1": "layer types ['hybrid'] are not full or sliding",
    "bert": "is not causal",
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_is_refused(family):
    model = REFUSED[family]()
    name = type(model).__name__
    with pytest.raises(
        ValueError, match=f"^{name} cannot be served: .*{re.escape(REASONS[family])}"
    ):
        look(model)


@pytest.mark.parametrize("family", ["jamba", "qwen3_next", "lfm2", "falcon_h1"])
def test_other_layers_are_found_without_the_names_of_their_types(family, monkeypatch):
    """Conventional names of layer types are a nicety: what is refused is tokens that mix."""
    monkeypatch.setattr("tcb.model.probe._check_layer_types", lambda *_: None)
    with pytest.raises(ValueError, match="tokens reach each other outside attention"):
        look(REFUSED[family]())


SEQ2SEQ_DECODERS = {
    "BartForCausalLM": {"init_std": 0.5},
    "BlenderbotForCausalLM": {"init_std": 0.5},
    "MarianForCausalLM": {"init_std": 0.5},
    "MBartForCausalLM": {"init_std": 0.5},
    "PegasusForCausalLM": {"init_std": 0.5},
    "PLBartForCausalLM": {"init_std": 0.5},
}


@pytest.mark.parametrize("name", SEQ2SEQ_DECODERS)
def test_decoders_that_count_their_places_themselves_are_refused(name):
    kind = getattr(transformers, name)
    config = kind.config_class(
        vocab_size=VOCAB,
        d_model=32,
        decoder_layers=2,
        encoder_layers=2,
        decoder_attention_heads=4,
        encoder_attention_heads=4,
        decoder_ffn_dim=64,
        encoder_ffn_dim=64,
        max_position_embeddings=64,
        pad_token_id=0,
        is_decoder=True,
        is_encoder_decoder=False,
        **SEQ2SEQ_DECODERS[name],
    )
    with pytest.raises(ValueError, match=f"^{name} cannot be served: it takes places, lengths"):
        look(kind(config).eval())


def count_places(queries, positions):
    return queries * (1 + torch.arange(queries.shape[1]))[:, None]


def scale_by_place_among_keys(queries, positions):
    return queries * (2 + torch.arange(queries.shape[1])).log()[:, None]


def scale_by_position(queries, positions):
    return queries * (2 + positions[0]).log()[:, None]


class Scaled(nn.Module):
    """A projection whose result is scaled by something else than its input."""

    def __init__(self, inner, scale, model):
        super().__init__()
        self.inner, self.scale, self.seen = inner, scale, None
        model.model.rotary_emb.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module, args, keywords):
        self.seen = keywords["position_ids"]

    def forward(self, states):
        return self.scale(self.inner(states), self.seen)


@pytest.mark.parametrize("scale", [count_places, scale_by_place_among_keys])
def test_a_model_that_reads_places_from_the_batch_is_refused(scale):
    model = FAMILIES["llama"]()
    attention = model.model.layers[1].self_attn
    attention.q_proj = Scaled(attention.q_proj, scale, model)
    with pytest.raises(ValueError, match="takes places, lengths or masks from the tokens"):
        look(model)


def test_a_model_that_reads_its_positions_is_served():
    model = FAMILIES["llama"]()
    attention = model.model.layers[1].self_attn
    attention.q_proj = Scaled(attention.q_proj, scale_by_position, model)
    assert len(look(model).layers) == 3


def test_rows_of_nan_are_no_reason_to_refuse():
    model = FAMILIES["llama"]()
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.nan
        model.lm_head.weight[9] = torch.nan
    assert look(model) == look(FAMILIES["llama"]())
    with torch.no_grad():
        # what an unlucky choice of tokens would try
        model.model.embed_tokens.weight[[1, 2, 4, 7, 10, 13, 16]] = torch.nan
    assert look(model) == look(FAMILIES["llama"]())
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"cannot be served: .* NaN or infinite for every token"):
        look(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_a_layer_of_a_dtype_that_does_not_fit_is_refused_by_name(dtype):
    model = FAMILIES["llama"]()
    model.model.layers[1].mlp.to(dtype)
    with pytest.raises(ValueError, match="cannot be served: its forward failed on packed tokens"):
        look(model)


@pytest.mark.parametrize("dtype", [torch.float64])
def test_dtypes_that_no_kernel_takes_are_refused_by_name(dtype):
    with pytest.raises(ValueError, match=r"torch\.float64; accepted: float32, float16, bfloat16"):
        look(FAMILIES["llama"]().to(dtype))


class Shift(nn.Module):
    """Gives every token a little of the token before it."""

    def __init__(self, inner, share):
        super().__init__()
        self.inner, self.share = inner, share

    def forward(self, states):
        return self.inner(states + self.share * states.roll(1, 1))


@pytest.mark.parametrize("share", [1.0, 0.02])
def test_a_little_mixing_is_found(share):
    model = FAMILIES["llama"]()
    model.model.layers[2].mlp = Shift(model.model.layers[2].mlp, share)
    with pytest.raises(ValueError, match="tokens reach each other outside attention"):
        look(model)


def change_call(model, change):
    """Let the first layer's attention be called with other keywords than it would be."""
    attention = model.model.layers[0].self_attn
    inner = attention.forward
    attention.forward = lambda *args, **kwargs: inner(*args, **{**kwargs, **change})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"position_bias": torch.zeros(1)}, "passes position_bias"),
        ({"indices": torch.zeros(1)}, "passes indices"),
        ({"is_causal": False}, "is not causal"),
        ({"sliding_window": 5}, "states a window of 5, but its mask shows something else"),
        ({"attention_mask": None, "sliding_window": 5}, "states a window, but has no mask"),
        ({"attention_mask": torch.zeros(1, 1, 6, 6)}, "has a mask of the model's own making"),
    ],
)
def test_what_a_layer_states_must_be_served(change, reason):
    model = FAMILIES["llama"]()
    change_call(model, change)
    with pytest.raises(ValueError, match=rf"attention call 0 \(LlamaAttention\) {reason}"):
        look(model)


def test_a_window_that_only_the_mask_knows_is_read_from_it():
    model = FAMILIES["mistral"]()
    inner = model.model.layers[0].self_attn
    inner.config = transformers.MistralConfig(**{**model.config.to_dict(), "sliding_window": None})
    assert [layer.window for layer in look(model).layers] == [WINDOW] * 3


def test_a_window_that_only_the_cache_of_generate_knows():
    model = FAMILIES["llama"]()
    model.config.sliding_window = 7
    with pytest.raises(ValueError, match="call 0 has window None, but `generate` keeps 7 tokens"):
        look(model)


def test_a_layer_that_is_called_twice():
    model = FAMILIES["llama"]()
    model.model.layers[2].self_attn = model.model.layers[1].self_attn
    with pytest.raises(
        ValueError, match=r"call 2 \(LlamaAttention\) is of a module that was called"
    ):
        look(model)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("LlamaModel", "its forward failed on packed tokens: .*logits"),
        ("LlamaForSequenceClassification", "logits are"),
    ],
)
def test_a_model_without_a_language_model_head(name, reason):
    with pytest.raises(ValueError, match=f"{name} cannot be served: .*{reason}"):
        look(build(name, **SIZES, num_labels=3))


def test_a_probe_leaves_no_trace():
    model = FAMILIES["gemma3"]().train()
    attributes = {name: dict(module.__dict__) for name, module in model.named_modules()}
    configuration, random = model.config.to_dict(), torch.get_rng_state()
    names = set(AttentionInterface())
    look(model)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.config.to_dict() == configuration
    assert model.config._attn_implementation == "sdpa"
    assert torch.is_grad_enabled()
    assert set(AttentionInterface()) - names <= {ATTENTION, "tcb_record"}
    for name, module in model.named_modules():
        assert module.training
        assert module.__dict__.keys() == attributes[name].keys()
        assert all(module.__dict__[key] is attributes[name][key] for key in module.__dict__)


def test_a_refused_model_keeps_our_attention_in_its_twin_only():
    model = REFUSED["llama4"]()
    clone = twin(model)
    with pytest.raises(ValueError, match="Llama4ForCausalLM"):
        probe(model, clone)
    assert clone.config._attn_implementation == ATTENTION
    assert model.config._attn_implementation == "sdpa"


def test_layers_are_numbered_on_the_twin_alone():
    model = FAMILIES["llama"]()
    clone = twin(model)
    probe(model, clone)
    assert [layer.self_attn.__dict__[LAYER] for layer in clone.model.layers] == [0, 1, 2]
    assert not any(LAYER in module.__dict__ for module in model.modules())


def test_two_probes_of_one_model_are_equal():
    model = FAMILIES["qwen3"]()
    assert look(model) == look(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "gpt_oss"])
def test_half_precision_is_no_mixing(family, dtype):
    assert look(FAMILIES[family]().to(dtype)).dtype == dtype


def test_autocast_of_the_caller_changes_nothing():
    model = FAMILIES["llama"]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert look(model).dtype == torch.float32
