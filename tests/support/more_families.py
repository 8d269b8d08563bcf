"""Further families, for tests that only look at how a forward is traced; see `families`."""

from collections.abc import Callable

from transformers import PreTrainedModel

from tests.support.families import EXPERTS, standard

_TWO_OF_FOUR = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, **EXPERTS}
_LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}

MORE_FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "apertus": standard("ApertusForCausalLM", head_dim=None),
    "arcee": standard("ArceeForCausalLM", head_dim=None),
    "bitnet": standard("BitNetForCausalLM", head_dim=None),
    "cohere": standard("CohereForCausalLM", head_dim=None),
    "deepseek_v2": standard("DeepseekV2ForCausalLM", first_k_dense_replace=1, **_ROUTED, **_LATENT),
    "dots1": standard("Dots1ForCausalLM", first_k_dense_replace=1, **_ROUTED),
    "ernie4_5": standard("Ernie4_5ForCausalLM"),
    "exaone_moe": standard("ExaoneMoeForCausalLM", num_experts=4, **_ROUTED),
    "flex_olmo": standard(
        "FlexOlmoForCausalLM", head_dim=None, num_experts=4, num_experts_per_tok=2
    ),
    "gemma": standard("GemmaForCausalLM"),
    "glm4_moe": standard("Glm4MoeForCausalLM", first_k_dense_replace=1, **_ROUTED),
    "gpt_bigcode": standard("GPTBigCodeForCausalLM", head_dim=None, num_key_value_heads=None),
    "granitemoe": standard("GraniteMoeForCausalLM", head_dim=None, **_TWO_OF_FOUR),
    "hunyuan_v1_dense": standard("HunYuanDenseV1ForCausalLM"),
    "minimax_m2": standard("MiniMaxM2ForCausalLM", **_TWO_OF_FOUR),
    "olmo": standard("OlmoForCausalLM", head_dim=None),
    "olmoe": standard("OlmoeForCausalLM", head_dim=None, num_experts=4, num_experts_per_tok=2),
    "persimmon": standard("PersimmonForCausalLM", head_dim=None, num_key_value_heads=None),
    "phi": standard("PhiForCausalLM", head_dim=None),
    "qwen2_moe": standard(
        "Qwen2MoeForCausalLM",
        head_dim=None,
        num_experts=4,
        shared_expert_intermediate_size=32,
        **EXPERTS,
    ),
    "seed_oss": standard("SeedOssForCausalLM"),
    "youtu": standard("YoutuForCausalLM", **_LATENT),
}
