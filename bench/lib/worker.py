"""Run workloads with the `tcb` of one source tree, as another process asks for them.

    python -m bench.lib.worker TREE

Reads a job a line from standard input, {"what": "serve" or "host", ...}, and answers each with a
line of JSON. All else of `bench` is this tree's own, so that two trees do the very same work.
"""

import hashlib
import importlib
import json
import os
import sys
import time
from functools import cache
from importlib import util
from pathlib import Path
from typing import Any

Job = dict[str, Any]


def main() -> None:
    """Answer jobs until standard input ends."""
    # what libraries print must not stand between the answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    use_package(Path(sys.argv[1]))
    for line in sys.stdin:
        job = json.loads(line)
        answer = {"serve": serve, "host": host}[job.pop("what")](**job)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def use_package(tree: Path) -> None:
    """Make the `tcb` of a tree the package of this process, under the names that `bench` uses."""
    folder = tree / "tcb"
    spec = util.spec_from_file_location(
        "tcb", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    sys.modules["tcb"] = module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # names in trees before version 0.2
    if not (folder / "planning" / "limits.py").is_file():
        sys.modules["tcb.planning.limits"] = importlib.import_module("tcb.planning.config")
    state = importlib.import_module("tcb.planning.state")
    if not hasattr(state, "SampledTokens"):
        state.SampledTokens = state.Results


def serve(model: str, workload: str, threads: int, changes: dict[str, int]) -> Job:
    """Seconds of one call of `generate_batch` in fp32 on the CPU, and a hash of its tokens."""
    from bench.lib.systems import run_tcb

    opened, prompts, new_tokens = _prepared(model, workload, threads, tuple(changes.items()))
    start = time.perf_counter()
    tokens = run_tcb(opened, prompts, new_tokens, {})
    seconds = time.perf_counter() - start
    digest = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
    return {"seconds": seconds, "tokens": sum(map(len, tokens)), "hash": digest}


@cache
def _prepared(model: str, workload: str, threads: int, changes: Any) -> tuple[Any, Any, int]:
    """The model, the prompts and the number of new tokens of each; one call has warmed it up."""
    import torch

    from bench.lib.prompts import WORKLOADS
    from bench.lib.systems import run_tcb

    torch.set_num_threads(threads)
    opened, tokenizer = _model(model)
    job = WORKLOADS[workload].changed(**dict(changes))
    prompts = job.prompts(tokenizer, opened.config.vocab_size)
    run_tcb(opened, prompts[:2], 2, {})
    return opened, prompts, job.new_tokens


@cache
def _model(name: str) -> tuple[Any, Any]:
    import torch

    from bench.models import open_model

    return open_model(name, torch.float32, "cpu")


def host(groups: str, page_size: int, sequences: int, context: int, steps: int) -> Job:
    """Milliseconds of a decode step: the median over `steps`, and of each of its stages."""
    from bench.host import measure

    (case,) = measure(groups, page_size, sequences, steps, (context,))
    return case


if __name__ == "__main__":
    main()
