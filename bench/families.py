"""Every causal family of transformers, tiny and random: equal to `generate`, or refused by name.

    python -m bench.families [NAME ...] [--minutes 15]

Each family is judged in a process of its own and gets one of these verdicts:

equal       tokens of five prompts, chunked and side by side, are those of `model.generate` alone
refused     before anything starts, with the reason
undecided   no tiny model could be made, or `generate` itself fails; the reason says which
wrong       other tokens, or an error in the middle of serving

Writes bench/results/families.json. Exits with 1 if a family is wrong.
"""

import argparse
import logging
import multiprocessing
import time
import warnings
from collections import Counter
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel

import tcb
from bench.lib.results import add_output, describe, store
from bench.lib.small_models import VOCAB, CannotBuild, families, small_models

NEW_TOKENS = 10
LENGTHS = (9, 3, 1, 17, 30)
# fewer different tokens might agree by accident
FEWEST_TOKENS = 8
SECONDS_A_FAMILY = 60.0
SETTINGS = {"page_size": 8, "num_blocks": 200, "max_batch_tokens": 16}
Verdict = tuple[str, str]


def main() -> None:
    """Judge the families as the command line says, print a line each and write the file."""
    arguments = _parse()
    end = time.monotonic() + 60 * arguments.minutes
    found: dict[str, Verdict] = {}
    for name in arguments.names or families():
        left = end - time.monotonic()
        found[name] = (
            judge_apart(name, min(left, SECONDS_A_FAMILY))
            if left > 0
            else ("undecided", "the time was over before its turn")
        )
        print(f"{name:28}{found[name][0]:12}{found[name][1][:120]}", flush=True)
    count = Counter(verdict for verdict, _ in found.values())
    content = {
        "kind": "families",
        "count": dict(sorted(count.items())),
        "families": {name: list(verdict) for name, verdict in found.items()},
        "environment": describe(torch.device("cpu")),
    }
    print(", ".join(f"{number} {verdict}" for verdict, number in sorted(count.items())))
    print(store(arguments.name or "families", content, arguments.out))
    raise SystemExit(int(count["wrong"] > 0))


def judge_apart(name: str, seconds: float) -> Verdict:
    """The verdict on a family, reached in a process that may die or hang."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_verdict, args=(name, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            return "undecided", f"it took longer than {seconds:.0f} s"
        return receiver.recv()
    except EOFError:
        process.join()
        return "wrong", f"its process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _send_verdict(name: str, sender: Any) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    sender.send(judge(name))


def judge(name: str) -> Verdict:
    """The verdict on a family: that on the first of its tiny models which allows one."""
    reasons = []
    try:
        for model in small_models(name):
            verdict, reason = compare(model)
            if verdict != "undecided":
                return verdict, reason
            reasons.append(reason)
    except CannotBuild as error:
        reasons.append(str(error))
    return "undecided", "; ".join(dict.fromkeys(reasons))


def compare(model: PreTrainedModel) -> Verdict:
    """The verdict on one model: whether a batch gives the tokens that `generate` gives alone."""
    prompts = _prompts(model)
    greedy = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    try:
        expected = [_alone(model, prompt, greedy) for prompt in prompts]
    except Exception as error:
        expected, failure = None, f"generate fails: {type(error).__name__}: {str(error)[:200]}"
    try:
        outputs = tcb.generate_batch(model, prompts, greedy, dict(SETTINGS)).values()
    except ValueError as error:
        is_broken = expected is None and "its forward failed" in str(error)
        if "cannot be served" in str(error) and not is_broken:
            return "refused", str(error)[:300]
        found = f"{type(error).__name__}: {str(error)[:200]}"
    except Exception as error:
        found = f"{type(error).__name__}: {str(error)[:200]}"
    else:
        found = [output.error or output.generated_tokens for output in outputs]
    if expected is None:
        return "undecided", failure
    if found != expected:
        return "wrong", f"{found} in place of {expected}"[:300]
    different = len({token for tokens in expected for token in tokens})
    if different < FEWEST_TOKENS:
        return "undecided", f"only {different} different tokens"
    return "equal", f"{different} different tokens"


def _alone(model: PreTrainedModel, prompt: list[int], options: GenerationConfig) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, generation_config=options)[
        0, ids.shape[1] :
    ].tolist()


def _prompts(model: PreTrainedModel) -> list[list[int]]:
    table = getattr(model.get_input_embeddings(), "weight", None)
    most = VOCAB if table is None else min(VOCAB, len(table))
    return [
        torch.randint(3, most, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        for length in LENGTHS
    ]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="families; all if none is named")
    parser.add_argument("--minutes", type=float, default=15.0, help="time for all of them")
    add_output(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
