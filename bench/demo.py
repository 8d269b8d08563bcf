"""Continuous batching of a real model in front of your eyes, and the same prompts the other ways.

A dozen prompts of different lengths go through `generate_batch`; each completion is printed; then
every system runs the same prompts in turn, and its tokens are held against `model.generate` alone.
"""

import argparse
import statistics
import sys

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import tcb
from bench.lib.prompts import sentences
from bench.lib.systems import SYSTEMS, greedy, references
from bench.models import SOURCES, FetchError, load
from bench.report import TITLES
from bench.serve import best_settings, measure

NEW_TOKENS = 48
ROUNDS = 2
# settings of a system that are tried before it is measured: its defaults, and those cut to fit
TRIED = 2
QUESTIONS = (
    "Hi!",
    "What is the capital of Portugal?",
    "Write one sentence about the sea.",
    "Why is the sky blue? Answer in two sentences.",
    "Name three things that a lighthouse keeper needs, and say why.",
    "Translate into French: the train to the coast leaves at seven in the morning.",
    "Explain to a child what a glacier is and where the water goes when it melts.",
    "Give me a recipe for rye bread. I have flour, water, salt and a starter, and one free day.",
)
# tokens of these grow with the number of sentences: about 100 to 900
SUMMARIES = (4, 8, 16, 32)


def main() -> None:
    """Run the demo as the command line says."""
    arguments = _parse()
    try:
        model, tokenizer = load(arguments.model, device=torch.device(arguments.device))
    except FetchError as error:
        sys.exit(f"{error}\nThe demo needs these weights; nothing else was wrong.")
    prompts = encode(tokenizer)
    lengths = sorted(map(len, prompts))
    print(
        f"{arguments.model} on {arguments.device}, {torch.get_num_threads()} threads: "
        f"{len(prompts)} prompts of {lengths[0]} to {lengths[-1]} tokens\n"
    )
    show_completions(model, tokenizer, prompts)
    compare(model, arguments.model, prompts, arguments.rounds)


def encode(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the prompts as token ids, in the tokenizer's chat form if it has one."""
    texts = [*QUESTIONS]
    texts += [f"Summarize: {sentences(count, seed=count)}" for count in SUMMARIES]
    if not tokenizer.chat_template:
        return [tokenizer(text)["input_ids"] for text in texts]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for text in texts
    ]


def show_completions(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]]
) -> None:
    """Generate with a progress bar, ends of text honoured, and print what came out."""
    options = greedy(NEW_TOKENS)
    options.eos_token_id = model.generation_config.eos_token_id
    outputs = tcb.generate_batch(model, prompts, generation_config=options, progress_bar=True)
    for prompt, (name, output) in zip(prompts, outputs.items(), strict=True):
        asked = tokenizer.decode(prompt, skip_special_tokens=True)
        answer = tokenizer.decode(output.generated_tokens, skip_special_tokens=True)
        print(f"\n{name} ({len(prompt)} tokens)  ...{_one_line(asked)[-70:]}")
        print(f"    {_one_line(answer)}")


def compare(model: PreTrainedModel, name: str, prompts: list[list[int]], rounds: int) -> None:
    """Run every system in turn on the same prompts, ends of text ignored, and print the table."""
    print(f"\n{NEW_TOKENS} new tokens for each prompt, medians of {rounds} rounds:", flush=True)
    settings = {
        system: best_settings(system, model, prompts, NEW_TOKENS, TRIED)[0] for system in SYSTEMS
    }
    measured = measure(model, prompts, NEW_TOKENS, settings, rounds)
    expected = references(model, name, prompts, NEW_TOKENS)
    print(f"\n{'':36}tokens/s   prompts with the tokens of model.generate alone")
    for system, (seconds, tokens) in measured.items():
        speed = len(prompts) * NEW_TOKENS / statistics.median(seconds)
        agree = sum(a == b for a, b in zip(tokens, expected, strict=True))
        print(f"{TITLES[system]:36}{speed:8.1f}   {agree} of {len(prompts)}")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(SOURCES), default="smollm2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
