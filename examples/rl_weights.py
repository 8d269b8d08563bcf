"""Weights that change while the engine lives: generate, train, generate again.

    python examples/rl_weights.py [model name]

`pause` lets every flying batch land and holds the loop still. Weights are written in place; after
the pause the engine compares them with those of its cache and forgets every key, value and shared
prefix that the old weights computed. Requests that were under way go on under the new weights.
"""

import torch
from models import load_model
from transformers import GenerationConfig

import tcb

SYSTEM = "You are a player. Answer with one move. "
BOARDS = ("x.o", "xo.", ".ox")


def main() -> None:
    """Three rounds of the same prompts, with a change of the weights after each."""
    model, tokenizer = load_model()
    prompts = [tokenizer.encode(SYSTEM + board) for board in BOARDS]
    options = GenerationConfig(max_new_tokens=8, do_sample=False)

    # full pages are shared: small ones, so that these short prompts fill some
    settings = tcb.ContinuousBatchingConfig(page_size=16)

    with tcb.continuous_batching_context_manager(
        model, options, continuous_batching_config=settings
    ) as manager:
        for step in range(3):
            ids = manager.add_requests(prompts)
            rollouts = [manager.get_result(request_id) for request_id in ids]
            for rollout in rollouts:
                print(step, rollout.generated_tokens)
            with manager.pause(), torch.no_grad():
                train(model, [rollout.generated_tokens for rollout in rollouts])


def train(model: torch.nn.Module, rollouts: list[list[int]]) -> None:
    """What stands for an optimizer's step: noise on every weight, written in place."""
    torch.manual_seed(sum(map(sum, rollouts)))
    for weight in model.parameters():
        weight.add_(torch.randn_like(weight), alpha=0.02)


if __name__ == "__main__":
    main()
