"""What every engine test compares with: `model.generate` on one prompt alone, and an engine run to
its end.
"""

import random
from collections.abc import Iterable, Sequence

import torch
from transformers import GenerationConfig, PreTrainedModel

from tcb.engine import Engine
from tcb.options.generation import read_options
from tcb.planning.config import ContinuousBatchingConfig
from tcb.planning.request import Request
from tests.planning.pool_check import check_pool

# lengths on, below and above the borders of pages of 4 and 8, and of chunks of 16 and 32
LENGTHS = (5, 23, 40, 12, 1, 64, 33)


def prompts_of(
    lengths: Iterable[int] = LENGTHS, *, seed: int = 0, vocab: int = 200
) -> list[list[int]]:
    """Random prompts of these lengths."""
    draw = random.Random(seed)
    return [[draw.randrange(2, vocab) for _ in range(length)] for length in lengths]


def alone(model: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """The greedy tokens of `model.generate` for this prompt."""
    ids = torch.tensor([prompt], device=model.device)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False
    )
    return output[0, len(prompt) :].tolist()


def new_engine(model: PreTrainedModel, **settings) -> Engine:
    """A greedy engine with these settings."""
    greedy = GenerationConfig(do_sample=False, eos_token_id=None)
    return Engine(model, read_options(model, greedy), ContinuousBatchingConfig(**settings))


def run(engine: Engine, *, most_steps: int = 5000) -> dict[str, list[int]]:
    """Step until nothing is left; the generated tokens by request id. Fails on errors and on
    leaks.
    """
    tokens = {}
    for _ in range(most_steps):
        if not engine.has_work:
            break
        for sequence in engine.step().finished:
            assert sequence.error is None, sequence.error
            tokens[sequence.request.id] = sequence.generated
    assert not engine.has_work, f"no end after {most_steps} steps"
    check_pool(engine.state.pool)
    assert not any(engine.state.pool.readers), "blocks are held although nothing runs"
    return tokens


def serve(engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """Submit all prompts at once and run to the end."""
    for i, prompt in enumerate(prompts):
        engine.submit(Request(f"r{i}", tuple(prompt), max_new_tokens))
    tokens = run(engine)
    return [tokens[f"r{i}"] for i in range(len(prompts))]
