"""What `model.generate` gives for a prompt alone, greedily: what every system is held to.

Kept on disk, one file a prompt, under a key of all that the tokens depend on. It knows no system.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel

from bench.environment import device_name
from bench.models import cache_folder

# an end token that no vocabulary has: None would mean the model's own
NO_TOKEN = 2**31 - 1


def greedy(new_tokens: int, pad_token: int = 0) -> GenerationConfig:
    """Return the options under which each request gets exactly `new_tokens` tokens."""
    return GenerationConfig(
        do_sample=False, max_new_tokens=new_tokens, eos_token_id=NO_TOKEN, pad_token_id=pad_token
    )


def references(
    model: PreTrainedModel,
    name: str,
    prompts: Sequence[list[int]],
    new_tokens: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """Return the `new_tokens` greedy tokens of each prompt alone.

    `name` must identify the weights. Writes files that are not there yet to the cache folder and
    calls `progress(done, total)` after each prompt.
    """
    found = []
    for prompt in prompts:
        found.append(_reference(model, name, prompt, new_tokens))
        if progress:
            progress(len(found), len(prompts))
    return found


def _reference(model: PreTrainedModel, name: str, prompt: list[int], new_tokens: int) -> list[int]:
    path = cache_folder() / "references" / f"{_key(model, name, prompt, new_tokens)}.json"
    if path.is_file():
        return json.loads(path.read_text())
    input_ids = torch.tensor([prompt], device=model.device)
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        generation_config=greedy(new_tokens),
    )
    tokens = output[0, len(prompt) :].tolist()
    assert len(tokens) == new_tokens, f"generate gave {len(tokens)} tokens, asked for {new_tokens}"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(tokens))
    partial.replace(path)
    return tokens


def _key(model: PreTrainedModel, name: str, prompt: list[int], new_tokens: int) -> str:
    facts = [
        name,
        str(model.dtype),
        device_name(model.device),
        torch.__version__,
        transformers.__version__,
        new_tokens,
        prompt,
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
