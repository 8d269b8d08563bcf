"""Two source trees side by side: speed of `generate_batch`, and host cost of a decode step.

    python -m bench.compare --base REVISION-OR-FOLDER [--what serve,host] [--rounds 5]

Each tree runs in a process of its own, and both live through the whole run; they do the same work
in turns, never at once, and every round begins with the other tree. Writes one JSON file with the
medians and their ratio: above 1, the new tree is the faster one.
"""

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.lib.results import ROOT, add_output, commit_of, describe, store

Ask = Callable[..., dict[str, Any]]

SEQUENCES = (256, 1024)
HOST = {"groups": "full", "page_size": 16, "context": 1000, "steps": 256}


def main() -> None:
    """Compare as the command line says, print a line a workload and write the file."""
    given = _parse()
    what = given.what.split(",")
    if set(what) - {"serve", "host"}:
        raise SystemExit(f"--what = {given.what!r}: must be serve, host or serve,host")
    with ExitStack() as stack:
        base = stack.enter_context(source_tree(given.base))
        asks = {
            "base": stack.enter_context(worker(base)),
            "new": stack.enter_context(worker(given.new)),
        }
        content: dict[str, Any] = {
            "kind": "compare",
            "base": {"source": Path(given.base).name, "commit": commit_of(given.base)},
            "new": {"source": given.new.name, "commit": commit_of(given.new)},
            "rounds": given.rounds,
        }
        if "serve" in what:
            content["model"] = given.model
            content["serve"] = {
                name: compare_serving(asks, given.model, name, given) for name in given.workloads
            }
        if "host" in what:
            content["host"] = {
                f"{count} sequences": compare_host(asks, count, given.rounds)
                for count in given.sequences
            }
    content["environment"] = describe(torch.device("cpu")) | {"threads": given.threads}
    print(store(given.name or "compare", content, given.out))


@contextmanager
def source_tree(source: str) -> Iterator[Path]:
    """The folder of a tree; the package of a revision is written to one that lasts as long."""
    if Path(source).is_dir():
        yield Path(source).resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "tree.tar"
        command = ["git", "-C", str(ROOT), "archive", f"--output={archive}", source, "tcb"]
        if (done := subprocess.run(command, capture_output=True, text=True)).returncode:
            raise SystemExit(f"--base = {source!r}: no folder, no revision: {done.stderr.strip()}")
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        yield Path(folder)


@contextmanager
def worker(tree: Path) -> Iterator[Ask]:
    """A function that has a job done in a process with the package of a tree."""
    command = [sys.executable, "-m", "bench.lib.worker", str(tree)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def ask(**job: Any) -> dict[str, Any]:
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            raise SystemExit(f"{tree}: the process ended with {process.wait()}")
        return json.loads(answer)

    try:
        yield ask
    finally:
        process.stdin.close()
        process.wait()


def take_turns(asks: dict[str, Ask], rounds: int, **job: Any) -> dict[str, list[dict[str, Any]]]:
    """The answers of both trees, round by round; each round begins with the other one."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in asks}
    for turn in range(rounds):
        for name in reversed(asks) if turn % 2 else asks:
            answers[name].append(asks[name](**job))
    return answers


def compare_serving(
    asks: dict[str, Ask], model: str, workload: str, given: argparse.Namespace
) -> dict[str, Any]:
    """Tokens a second of both trees on one workload, and whether their tokens are the same."""
    changes = {"requests": given.requests, "new_tokens": given.new_tokens}
    job = {"model": model, "workload": workload, "threads": given.threads, "changes": changes}
    answers = take_turns(asks, given.rounds, what="serve", **job)
    found: dict[str, Any] = {
        "tokens_equal": len({a["hash"] for r in answers.values() for a in r}) == 1
    }
    for name, rows in answers.items():
        seconds = [row["seconds"] for row in rows]
        found[name] = {
            "tokens_per_second": round(rows[0]["tokens"] / median(seconds), 2),
            "seconds": [round(value, 3) for value in seconds],
        }
    base, new = (found[name]["tokens_per_second"] for name in ("base", "new"))
    found["ratio"] = round(new / base, 4)
    same = "the same tokens" if found["tokens_equal"] else "OTHER TOKENS"
    print(f"{workload}: {base:.1f} -> {new:.1f} tokens/s, ratio {new / base:.4f}, {same}")
    return found


def compare_host(asks: dict[str, Ask], sequences: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of a decode step of both trees: medians over rounds of medians over steps."""
    answers = take_turns(asks, rounds, what="host", sequences=sequences, **HOST)
    each = {name: [row["median_ms"] for row in rows] for name, rows in answers.items()}
    base, new = (median(each[name]) for name in ("base", "new"))
    print(f"step of {sequences} sequences: {base:.3f} -> {new:.3f} ms, ratio {base / new:.4f}")
    found = {"base_ms": round(base, 4), "new_ms": round(new, 4), "ratio": round(base / new, 4)}
    return {**HOST, **found, "each_ms": each}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--base", required=True, help="a git revision, or the folder of another tree")
    add("--new", type=Path, default=ROOT, help="folder of the tree to compare with it")
    add("--what", default="serve,host", help="serve, host, or both (the default)")
    add("--model", default="smollm2", help="a name that bench.models knows")
    add("--workloads", nargs="+", default=["chat", "long"], help="of bench.serve")
    add("--requests", type=int, help="prompts, if not those of the workload")
    add("--new-tokens", type=int, help="new tokens of each, if not those of the workload")
    add("--sequences", nargs="+", type=int, default=SEQUENCES, help="of the host's steps")
    add("--rounds", type=int, default=5)
    add("--threads", type=int, default=torch.get_num_threads())
    add_output(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
