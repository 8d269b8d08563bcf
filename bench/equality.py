"""Real models: are the tokens of `generate_batch` those of `model.generate` alone, every one?

Prompts of 5 to 1,500 tokens under a table of settings; a covering array of pairs, or all of them.
It knows the public interface of the package only, and how to count the plans that gave blocks back.
"""

import argparse
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import tcb
import tcb.engine
from bench.lib.prompts import prompts as make_prompts
from bench.lib.results import RESULTS, describe, store
from bench.lib.systems import greedy, references
from bench.models import SOURCES, load

NUM_PROMPTS = 32
SHORTEST, LONGEST = 5, 1500
NEW_TOKENS = 64
# enough host memory for every block of the tight pools
HOST_GIB = 1.0


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table. A tight pool holds just the longest request: others must give way."""

    max_batch_tokens: int
    page_size: int
    asynchronous: bool
    scheduler: str
    tight_pool: bool
    offload: bool


LEVELS = {
    "max_batch_tokens": (64, 512),
    "page_size": (16, 256),
    "asynchronous": (False, True),
    "scheduler": ("fifo", "prefill_first"),
    "tight_pool": (False, True),
    "offload": (False, True),
}


def every_setting() -> list[Setting]:
    """All combinations; where nothing has to give way, offload changes nothing and is left off."""
    rows = [Setting(*row) for row in itertools.product(*LEVELS.values())]
    return [row for row in rows if row.tight_pool or not row.offload]


def pairwise_settings() -> list[Setting]:
    """Eight rows in which any two factors meet in all four combinations.

    The columns are the parities of the non-empty subsets of three bits (an orthogonal array).
    """
    rows = []
    for a, b, c in itertools.product((0, 1), repeat=3):
        columns = (a, b, c, a ^ b, b ^ c, a ^ c)
        levels = zip(columns, LEVELS.values(), strict=True)
        rows.append(Setting(*(values[bit] for bit, values in levels)))
    return rows


def log_spaced(shortest: int, longest: int, count: int) -> list[int]:
    """Return `count` lengths from shortest to longest in equal ratios."""
    ratio = (longest / shortest) ** (1 / (count - 1))
    return [round(shortest * ratio**i) for i in range(count)]


def real_prompts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The prompts, in an order that puts short and long ones into one batch."""
    prompts = make_prompts(tokenizer, log_spaced(SHORTEST, LONGEST, NUM_PROMPTS))
    random.Random(0).shuffle(prompts)
    return prompts


@contextmanager
def counting_preemptions() -> Iterator[Counter]:
    """Count the preemptions of all plans made inside the block, by kind."""
    counts: Counter = Counter()
    plan_batch = tcb.engine.plan_batch

    def counted(*arguments, **options):
        plan = plan_batch(*arguments, **options)
        counts.update(preemption.kind for preemption in plan.preemptions)
        return plan

    tcb.engine.plan_batch = counted
    try:
        yield counts
    finally:
        tcb.engine.plan_batch = plan_batch


def config_of(setting: Setting) -> tcb.ContinuousBatchingConfig:
    """The configuration of one row; pools are counted in blocks of `page_size` tokens."""
    ample = NUM_PROMPTS * (LONGEST + NEW_TOKENS)
    tokens = LONGEST + NEW_TOKENS if setting.tight_pool else ample
    return tcb.ContinuousBatchingConfig(
        page_size=setting.page_size,
        num_blocks=-(-tokens // setting.page_size),
        max_batch_tokens=setting.max_batch_tokens,
        use_async_batching=setting.asynchronous,
        scheduler_type=setting.scheduler,
        cpu_offload_space=HOST_GIB if setting.offload else 0.0,
    )


def run(
    model: PreTrainedModel, prompts: list[list[int]], expected: list[list[int]], setting: Setting
) -> dict[str, Any]:
    """Generate under one setting; `wrong` in the result lists the prompts that differ."""
    start = time.perf_counter()
    with counting_preemptions() as preemptions:
        outputs = tcb.generate_batch(
            model,
            prompts,
            generation_config=greedy(NEW_TOKENS),
            continuous_batching_config=config_of(setting),
        )
    seconds = time.perf_counter() - start
    pairs = list(zip(outputs.values(), expected, strict=True))
    wrong = [i for i, (output, tokens) in enumerate(pairs) if output.generated_tokens != tokens]
    return {
        "setting": asdict(setting),
        "seconds": round(seconds, 2),
        "preemptions": dict(preemptions),
        "equal": len(pairs) - len(wrong),
        "wrong": wrong,
        "errors": [output.error for output, _ in pairs if output.error],
    }


def main() -> None:
    """Run the rows and exit with 1 if a single token differs."""
    arguments = _parse()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    model, tokenizer = load(arguments.model, torch.float32, device)
    prompts = real_prompts(tokenizer)
    expected = references(model, arguments.model, prompts, NEW_TOKENS, _say_progress)
    rows = []
    settings = every_setting() if arguments.full else pairwise_settings()
    for setting in (s for i, s in enumerate(settings) if i in (arguments.rows or (i,))):
        rows.append(run(model, prompts, expected, setting))
        print(
            f"{rows[-1]['equal']}/{len(prompts)} equal, {rows[-1]['seconds']:7.1f} s, "
            f"preemptions {rows[-1]['preemptions'] or 'none'}, {setting}",
            flush=True,
        )
    path = store(
        arguments.name or f"equality-{device.type}-{arguments.model}",
        {
            "kind": "equality",
            "model": arguments.model,
            "prompts": [len(prompt) for prompt in prompts],
            "new_tokens": NEW_TOKENS,
            "rows": rows,
            "environment": describe(device),
        },
        arguments.out,
    )
    print(path)
    sys.exit(_complain(rows))


def _complain(rows: list[dict[str, Any]]) -> bool:
    """Name the rows that differ; True if there are any, or if no tight pool preempted anybody."""
    failed = [row for row in rows if row["wrong"]]
    for row in failed:
        _warn(f"prompts {row['wrong']} differ under {row['setting']} {row['errors'][:3]}")
    quiet = not any(row["preemptions"] for row in rows)
    if quiet:
        _warn("no pool was tight enough for a preemption: the table shows none")
    return bool(failed) or quiet


def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(SOURCES), default="smollm2")
    rows = parser.add_mutually_exclusive_group()
    rows.add_argument("--pairwise", action="store_true", help="eight rows (the default)")
    rows.add_argument("--full", action="store_true", help="every combination")
    parser.add_argument("--rows", type=int, nargs="+", help="only these rows, counted from 0")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--name", help="name of the JSON file, without its ending")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    return parser.parse_args()


def _say_progress(done: int, total: int) -> None:
    print(f"\rgenerate alone: {done}/{total}", end="\n" if done == total else "", flush=True)


if __name__ == "__main__":
    main()
