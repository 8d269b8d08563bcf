"""A tiny random Llama, and options of `generate` that the history of a request decides.

It builds and lists, and tests nothing. The model has wide weights, so that the next token depends
on every position; the options are chosen by what this model generates without them.
"""

import warnings

import torch
from transformers import LlamaConfig, LlamaForCausalLM, WatermarkingConfig

from tcb.options.generation import read_options

VOCAB = 61
PROMPT = (5, 9, 31, 9, 5, 9)

NEW_TOKENS = 12

HISTORY = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.4},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "min_length": {"min_length": len(PROMPT) + 5},
    "min_new_tokens": {"min_new_tokens": 7},
    "bad_words_ids": {"bad_words_ids": [[3], [56, 5], [29]]},
    "suppress_tokens": {"suppress_tokens": list(range(1, 60, 2))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(0, 60, 2))},
    "sequence_bias": {"sequence_bias": [[[7], 4.0], [[9, 11], 30.0], [[7, 12], 30.0]]},
    "forced_eos_token_id": {"forced_eos_token_id": 17},
    "forced_bos_token_id": {"forced_bos_token_id": 23},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.6)},
    "remove_invalid_values": {"remove_invalid_values": True},
    "renormalize_logits": {"renormalize_logits": True},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=6.0)},
    "several": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 4},
}
WARPERS = {
    "typical_p": {"typical_p": 0.7},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02},
    "eta_cutoff": {"eta_cutoff": 0.1},
    "top_h": {"top_h": 0.5},
    "in order": {
        "repetition_penalty": 1.4,
        "temperature": 0.7,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.02,
        "typical_p": 0.95,
        "renormalize_logits": True,
    },
}


def build() -> LlamaForCausalLM:
    """The model, fp32, evaluation mode; the global random state stays."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.25,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return LlamaForCausalLM(config).eval()


def read(model, generation_config=None, **options):
    """The generation options that these keywords make of a config."""
    return read_options(model, generation_config, options)


def generate(model, **fields):
    """What `model.generate` makes of the prompt, without the warnings of these options."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.generate(torch.tensor([PROMPT]), **fields)
