"""The model of an example: the one named on the command line, or a tiny random one.

The tiny one needs no network: a token is a byte, and its text makes no sense.
"""

import sys
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)


class Bytes:
    """A tokenizer whose token ids are the bytes of a text."""

    def encode(self, text: str) -> list[int]:
        """The bytes of the text."""
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        """The text of these bytes; what is no text is shown by its number."""
        return bytes(tokens).decode("ascii", errors="backslashreplace")


def load_model() -> tuple[PreTrainedModel, Any]:
    """A model and its tokenizer: of the name in `sys.argv[1]`, else tiny and random."""
    if len(sys.argv) > 1:
        name = sys.argv[1]
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
        return model.to(device).eval(), AutoTokenizer.from_pretrained(name)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        # large, or the tiny model would repeat one token for ever
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval(), Bytes()
