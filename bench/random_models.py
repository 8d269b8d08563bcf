"""Models of real shapes with random weights, for machines where no weights can be had.

Speed depends on shapes, not on values. It knows configurations only; nothing is downloaded.
"""

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

# the published shapes of Qwen3-4B and Gemma-3-4B (its text part); the tiny ones are for trying out
SHAPES = {
    "random-llama-tiny": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    ),
    "random-gemma3-tiny": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            sliding_window=32,
        )
    ),
    "random-qwen3-4b": lambda: Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=151936,
            hidden_size=2560,
            intermediate_size=9728,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=40960,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
            tie_word_embeddings=True,
        )
    ),
    "random-gemma3-4b": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=262208,
            hidden_size=2560,
            intermediate_size=10240,
            num_hidden_layers=34,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            sliding_window=1024,
        )
    ),
}


def build(name: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Return the model `name` in eval mode, its weights drawn from seed 0 on the device itself."""
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return SHAPES[name]().eval()
    finally:
        torch.set_default_dtype(before)
