"""Builds tiny random causal language models, one for each family that is served or refused.

A builder knows a configuration and nothing of the engine. Weights are drawn wide (standard
deviation 0.25), so that the next token depends on every position and layer: with the default 0.02 a
tiny model can agree with `generate` by accident. Windows are short, so that short prompts cross
them. No model has an end-of-sequence token.
"""

from collections.abc import Callable

import torch
import transformers
from transformers import PreTrainedModel

VOCAB = 211
WINDOW = 12
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}


def build(name: str, *, seed: int = 0, **options) -> PreTrainedModel:
    """A model of class `name` of transformers, fp32, evaluation mode; the global RNG stays."""
    model_class = getattr(transformers, name)
    settings = {
        "initializer_range": 0.25,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    config = model_class.config_class(**{**settings, **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).eval()
    if hasattr(model, "generation_config"):
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
    return model


def standard(name: str, **options) -> Callable[[], PreTrainedModel]:
    """A builder of a model with the usual names of sizes; None in `options` drops a name."""
    sizes = {key: value for key, value in {**SIZES, **options}.items() if value is not None}
    return lambda: build(name, **sizes)


def _pattern(*kinds: str) -> list[str]:
    return [f"{kind}_attention" for kind in kinds]


def _gemma3n() -> PreTrainedModel:
    return build(
        "Gemma3nForCausalLM",
        **{**SIZES, "num_hidden_layers": 4, "intermediate_size": [64] * 4},
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        sliding_window=WINDOW,
        layer_types=_pattern("sliding", "full", "sliding", "full"),
        num_kv_shared_layers=2,
        laurel_rank=8,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        tie_word_embeddings=False,
    )


def _deepseek_v3() -> PreTrainedModel:
    # latent attention: queries and keys have 8 + 4 dimensions, values 6
    return build(
        "DeepseekV3ForCausalLM",
        **{**SIZES, "num_key_value_heads": 4, "head_dim": 4},
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
    )


def _gpt2() -> PreTrainedModel:
    return build(
        "GPT2LMHeadModel", vocab_size=VOCAB, n_embd=48, n_layer=3, n_head=4, n_positions=512
    )


def _opt() -> PreTrainedModel:
    return build(
        "OPTForCausalLM",
        vocab_size=VOCAB,
        hidden_size=48,
        word_embed_proj_dim=48,
        ffn_dim=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=512,
        init_std=0.25,
    )


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": standard("LlamaForCausalLM", head_dim=8),
    "qwen2": standard("Qwen2ForCausalLM", head_dim=None),
    "qwen3": standard("Qwen3ForCausalLM"),
    "qwen3_moe": standard("Qwen3MoeForCausalLM", num_experts=4, **EXPERTS),
    "mixtral": standard("MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2),
    "mistral": standard("MistralForCausalLM", sliding_window=WINDOW),
    "gemma2": standard(
        "Gemma2ForCausalLM",
        sliding_window=WINDOW,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=10.0,
        attn_implementation="eager",
        query_pre_attn_scalar=10,
        tie_word_embeddings=False,
    ),
    "gemma3": standard(
        "Gemma3ForCausalLM",
        sliding_window=WINDOW,
        layer_types=_pattern("sliding", "sliding", "full"),
        tie_word_embeddings=False,
    ),
    "gemma3n": _gemma3n,
    "gpt_oss": standard(
        "GptOssForCausalLM",
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=_pattern("sliding", "full", "sliding"),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    # states no window to its attention: only its mask shows it
    "phimoe": standard(
        "PhimoeForCausalLM",
        head_dim=None,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "phi3": standard("Phi3ForCausalLM", head_dim=None),
    "olmo2": standard("Olmo2ForCausalLM", head_dim=None),
    "olmo3": standard(
        "Olmo3ForCausalLM",
        head_dim=None,
        sliding_window=WINDOW,
        layer_types=_pattern("sliding", "sliding", "full"),
    ),
    "cohere2": standard(
        "Cohere2ForCausalLM",
        head_dim=None,
        sliding_window=WINDOW,
        layer_types=_pattern("sliding", "full", "sliding"),
    ),
    "granite": standard("GraniteForCausalLM", head_dim=None, attention_multiplier=0.3),
    "smollm3": standard("SmolLM3ForCausalLM", head_dim=None, no_rope_layers=[1, 0, 1]),
    "gpt2": _gpt2,
    "gpt_neox": standard("GPTNeoXForCausalLM", head_dim=None, num_key_value_heads=None),
    "opt": _opt,
    "starcoder2": standard("Starcoder2ForCausalLM", head_dim=None, sliding_window=WINDOW),
    "exaone4": standard(
        "Exaone4ForCausalLM",
        head_dim=None,
        sliding_window=WINDOW,
        layer_types=_pattern("sliding", "full", "sliding"),
    ),
    "deepseek_v3": _deepseek_v3,
    "glm": standard("GlmForCausalLM"),
    "glm4": standard("Glm4ForCausalLM"),
    "ministral": standard(
        "MinistralForCausalLM",
        sliding_window=WINDOW,
        layer_types=_pattern("sliding", "full", "sliding"),
    ),
}


def _bloom() -> PreTrainedModel:
    return build("BloomForCausalLM", vocab_size=VOCAB, hidden_size=48, n_layer=2, n_head=4)


def _falcon() -> PreTrainedModel:
    return build(
        "FalconForCausalLM",
        vocab_size=VOCAB,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
    )


def _mamba() -> PreTrainedModel:
    return build(
        "MambaForCausalLM", vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4
    )


def _t5() -> PreTrainedModel:
    return build(
        "T5ForConditionalGeneration",
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )


REFUSED: dict[str, Callable[[], PreTrainedModel]] = {
    "bloom": _bloom,
    "falcon": _falcon,
    "mamba": _mamba,
    "t5": _t5,
    # does not hand keywords on to its attention
    "stablelm": standard("StableLmForCausalLM", head_dim=None, partial_rotary_factor=0.5),
    "llama4": standard(
        "Llama4ForCausalLM",
        intermediate_size_mlp=64,
        num_local_experts=2,
        num_hidden_layers=4,
        attention_chunk_size=16,
    ),
    "jamba": standard(
        "JambaForCausalLM",
        head_dim=None,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        mamba_d_state=4,
    ),
    "qwen3_next": standard(
        "Qwen3NextForCausalLM",
        num_experts=4,
        shared_expert_intermediate_size=32,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        **EXPERTS,
    ),
    "lfm2": standard(
        "Lfm2ForCausalLM", head_dim=None, layer_types=["conv", "full_attention", "conv"]
    ),
    "falcon_h1": standard(
        "FalconH1ForCausalLM",
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_n_groups=1,
    ),
    "bert": standard("BertLMHeadModel", head_dim=None, num_key_value_heads=None, is_decoder=False),
}
