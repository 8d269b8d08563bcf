"""Continuous batching of a real model in front of your eyes, and the same questions the other ways.

A dozen prompts of different lengths go through a manager, and each completion is printed when it
comes. Then every system answers the same questions in turn, and its tokens are held against
`model.generate` alone. The comparison takes about a minute, on a busy machine too: it asks for as
many tokens as the time allows.
"""

import argparse
import statistics
import sys
import time

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import tcb
from bench.lib.prompts import sentences
from bench.lib.systems import SYSTEMS, Settings, greedy, references
from bench.models import SOURCES, FetchError, load
from bench.report import TITLES
from bench.serve import timed

# new tokens of a completion, and of a question in the comparison: at most, and at least
NEW_TOKENS, MOST_TOKENS, FEWEST_TOKENS = 24, 24, 4
SECONDS = 60.0
ROUNDS = 3
# what all of the comparison takes, in runs of this package: one round of three systems, one prompt
# after the other for the check, and some that spare
RUNS = 14
# the pool of transformers that fits: its default share of the memory is written to at once
FITS = "cut, 512 a batch"
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
# tokens of these grow with the number of sentences: about 80 to 350
SUMMARIES = (2, 4, 8, 12)


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
        f"{len(prompts)} prompts of {lengths[0]} to {lengths[-1]} tokens\n",
        flush=True,
    )
    show_completions(model, tokenizer, prompts)
    compare(model, arguments.model, prompts[: len(QUESTIONS)], arguments.seconds)


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
    """Generate, ends of text honoured, and print each completion when it comes."""
    options = greedy(NEW_TOKENS)
    options.eos_token_id = model.generation_config.eos_token_id
    begin = time.perf_counter()
    with tcb.continuous_batching_context_manager(model, options) as manager:
        asked = dict(zip(manager.add_requests(prompts), prompts, strict=True))
        manager.stop(block=False)
        for output in manager:
            prompt = asked[output.request_id]
            question = _one_line(tokenizer.decode(prompt, skip_special_tokens=True))[-70:]
            answer = _one_line(tokenizer.decode(output.generated_tokens, skip_special_tokens=True))
            seconds = f"{time.perf_counter() - begin:.1f} s"
            print(f"{output.request_id}, {len(prompt)} tokens, {seconds}  ...{question}")
            print(f"    {answer}\n", flush=True)


def compare(model: PreTrainedModel, name: str, prompts: list[list[int]], seconds: float) -> None:
    """Let every system answer in turn, ends of text ignored, and print the table.

    Every system runs once; further rounds, and the check of each prompt, begin while there is time.
    """
    end = time.perf_counter() + seconds
    settings = {
        each: system.candidates(model, prompts, MOST_TOKENS).get(FITS, {})
        for each, system in SYSTEMS.items()
    }
    new_tokens = choose_length(timed("tcb", model, prompts, MOST_TOKENS, {})[0], seconds)
    print(f"{len(prompts)} questions, {new_tokens} new tokens for each:", flush=True)
    spent, tokens = take_turns(model, prompts, new_tokens, settings, end)
    expected: list[list[int]] = []
    for prompt in prompts:
        if not expected or time.perf_counter() < end:
            expected += references(model, name, [prompt], new_tokens)
    print(f"\n{'':36}tokens/s   runs   prompts with the tokens of model.generate alone")
    for system, runs in spent.items():
        speed = len(prompts) * new_tokens / statistics.median(runs)
        agree = sum(a == b for a, b in zip(tokens[system], expected, strict=False))
        print(f"{TITLES[system]:36}{speed:8.1f}   {len(runs):4}   {agree} of {len(expected)}")


def choose_length(seconds: float, budget: float) -> int:
    """New tokens a prompt, if this package took these seconds for `MOST_TOKENS`."""
    fits = int(MOST_TOKENS * budget / (RUNS * seconds))
    return max(FEWEST_TOKENS, min(MOST_TOKENS, fits))


def take_turns(
    model: PreTrainedModel,
    prompts: list[list[int]],
    new_tokens: int,
    settings: dict[str, Settings],
    end: float,
) -> tuple[dict[str, list[float]], dict[str, list[list[int]]]]:
    """The seconds of the runs of each system, and its tokens: one round, and others that are
    expected to be over before two thirds of the time that is left.
    """
    spent: dict[str, list[float]] = {name: [] for name in settings}
    tokens = {}
    for turn in range(ROUNDS):
        left = end - time.perf_counter()
        if turn and 1.5 * sum(runs[-1] for runs in spent.values()) > left:
            break
        for name in list(settings)[turn:] + list(settings)[:turn]:
            taken, tokens[name] = timed(name, model, prompts, new_tokens, settings[name])
            spent[name].append(taken)
            print(f"round {turn + 1}, {name}: {taken:.2f} s", file=sys.stderr, flush=True)
    return spent, tokens


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(SOURCES), default="smollm2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the comparison")
    return parser.parse_args()


if __name__ == "__main__":
    main()
