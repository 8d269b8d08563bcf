"""The cases of the kernel matrix: rows of a covering array, each as one small problem.

It knows what the operations are called and at which lengths they go wrong; it runs nothing.
"""

import random
from dataclasses import dataclass
from itertools import combinations

import torch

from tests.kernels.covering import cover
from tests.support.oracle import Case

FACTORS = {
    # fresh: no context. chunk: behind context. mixed: both, single tokens, sequences of none.
    # decode, split: parts as the launcher likes, or forced. write: what is read was written by
    # write_kv. tables: page_tables and write_kv, then a chunk and a token. fork: read from copies
    "contract": ("fresh", "chunk", "mixed", "decode", "split", "write", "tables", "fork"),
    "dtype": (torch.float32, torch.float16),
    "window": ("none", "one", "small", "page+1", "large"),
    "mask": ("plain", "softcap", "sinks", "both"),
    "group": (1, 2, 4, 5, 7, 8, 12, 16, 32),
    "dim": (16, 64, 80, 96, 128, 256),
    "page": (16, 32, 64, 256),
    "layout": ("apart", "packed"),
}
SIZES = [len(levels) for levels in FACTORS.values()]
PAIRS, TRIPLES = (list(combinations(range(len(SIZES)), count)) for count in (2, 3))


@dataclass(frozen=True, slots=True)
class Run:
    """A case, the contract it is about, and a seed for what is left open."""

    contract: str
    case: Case
    seed: int

    def __str__(self) -> str:
        return f"{self.seed}-{self.contract}-w{self.case.window}-p{self.case.page_size}-{self.case}"


def plan(seed: int, levels: tuple[int, ...]) -> Run:
    """The run of one row of the array; lengths lie at the edges of pages, tiles and windows."""
    rng = random.Random(seed)
    named = zip(FACTORS.items(), levels, strict=True)
    at = {name: values[level] for (name, values), level in named}
    page, group = at["page"], at["group"]
    sequences = lengths(rng, at["contract"], page, group)
    longest = max(context + chunk for context, chunk in sequences)
    window = {
        "none": None,
        "one": 1,
        "small": rng.randrange(2, 14),
        "page+1": page + 1,
        "large": max(page + 2, longest + rng.choice((-1, 0, 1, 1000))),
    }[at["window"]]
    decode = not any(chunk for _, chunk in sequences)
    kv_heads = rng.choice((1, 1, 2, 3) if group <= 4 else (1, 1, 1, 1, 2))
    case = Case(
        sequences,
        decode=decode,
        heads=group * kv_heads,
        kv_heads=kv_heads,
        dim=at["dim"],
        page_size=page,
        window=window,
        softcap=rng.choice((5.0, 30.0, 50.0)) if at["mask"] in ("softcap", "both") else None,
        sinks=rng.choice((-2.0, 0.5, 40.0)) if at["mask"] in ("sinks", "both") else None,
        dtype=at["dtype"],
        scale=rng.choice((None, None, 0.3)),
        magnitude=rng.choice((1.0, 1.0, 8.0)),
        packed=at["layout"] == "packed",
        padding=0 if decode else rng.choice((0, 3)),
        num_splits=rng.choice((1, 2, 3, 5, 16)) if at["contract"] == "split" else None,
        spare=rng.choice((0, 1, 3)),
        wild=True,
    )
    return Run(at["contract"], case, seed)


def lengths(rng, contract, page, group) -> tuple[tuple[int, int], ...]:
    """Sequences (context, chunk) of a contract, as few and as short as can show a fault."""
    near = [edge + step for edge in (16, 32, page) for step in (-1, 0, 1)]
    contexts = [1, 5, *near, *near] + ([2 * page - 1, 2 * page + 3] if page < 256 else [300])
    # rows of two or three tiles of 32
    chunks = range(2, max(5, min(40, 72 // group)))

    def context():
        return rng.choice(contexts)

    def chunk():
        return rng.choice(chunks)

    if contract in ("write", "fork"):
        contract = rng.choice(("chunk", "decode"))
    sequences = {
        "fresh": [(0, chunk()), (0, chunk()), (0, 1)],
        "chunk": [(context(), chunk()), (context(), chunk())],
        "mixed": [(context(), 1), (context(), chunk()), (0, chunk()), (context(), 0)],
        "decode": [(context(), 0), (context(), 0), (0, 0)],
        "split": [(context(), 0), (context() + 40, 0), (0, 0)],
        "tables": [(context(), chunk()), (0, chunk())],
    }[contract]
    rng.shuffle(sequences)
    return tuple(sequences)


def levels(run: Run) -> tuple[int, ...]:
    """The row of the array that a run stands for, read from the run itself."""
    case = run.case
    windows = {None: "none", 1: "one", case.page_size + 1: "page+1"}
    small = case.window is not None and case.window < min(case.page_size, 32)
    masks = {(False, False): "plain", (True, False): "softcap", (False, True): "sinks"}
    found = {
        "contract": run.contract,
        "dtype": case.dtype,
        "window": windows.get(case.window, "small" if small else "large"),
        "mask": masks.get((case.softcap is not None, case.sinks is not None), "both"),
        "group": case.heads // case.kv_heads,
        "dim": case.dim,
        "page": case.page_size,
        "layout": "packed" if case.packed else "apart",
    }
    return tuple(FACTORS[name].index(level) for name, level in found.items())


def runs(strength: list[tuple[int, ...]], seed: int, first: int) -> list[Run]:
    """The runs of an array of this strength, numbered from `first` on."""
    rows = cover(SIZES, strength, seed=seed, tries=4)
    return [plan(number, row) for number, row in enumerate(rows, first)]


RUNS = runs([*PAIRS, *TRIPLES], seed=0, first=0)
# of every pair only: what each run of the tests has time for
DAILY_RUNS = runs(PAIRS, seed=1, first=len(RUNS))
