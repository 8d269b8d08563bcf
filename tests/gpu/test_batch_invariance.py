"""With `deterministic`: the same bits alone, in any batch, however chunked at pages."""

import itertools
from dataclasses import replace

import pytest
import torch

from bench.lib.contenders import takes_deterministic
from tests.gpu.checking import BRAIN, HALF, attend, sized
from tests.support.oracle import Case, Problem, assert_close, build

WINDOWS = [(None,), (50,)]


def shaped(sequences: tuple[tuple[int, int], ...], window: int | None, small: bool) -> Case:
    if not takes_deterministic():
        pytest.skip("torch operations are not `deterministic`")
    shape = {"heads": 4, "kv_heads": 2, "dim": 16 if small else 128, "page_size": 16}
    return Case(sequences, window=window, dtype=HALF if small else BRAIN, **shape)


@sized("window", WINDOWS, WINDOWS)
def test_sequences_have_the_same_bits_alone_and_in_another_order(window, small, device):
    chunks = ((64, 1), (0, 20)) if small else ((4000, 1), (0, 330), (160, 200), (5, 1))
    case = shaped(chunks, window, small)
    problem = build(case, device)
    together = attend(problem, case, deterministic=True)
    assert_close(together, problem)
    for rows in ([i] for i in range(len(chunks))):
        part, tokens = some_of(problem, rows)
        alone = attend(part, case, deterministic=True)
        assert torch.equal(alone, together[tokens]), f"sequence {rows[0]} alone has other bits"
    part, tokens = some_of(problem, list(reversed(range(len(chunks)))))
    assert torch.equal(attend(part, case, deterministic=True), together[tokens]), "order matters"


def some_of(problem: Problem, rows: list[int]) -> tuple[Problem, torch.Tensor]:
    """Some sequences of a problem in another order, and where their tokens were."""
    device = problem.query.device
    starts = problem.query_start.tolist()
    tokens = torch.cat([torch.arange(starts[i], starts[i + 1], device=device) for i in rows])
    lengths = torch.tensor([0, *(starts[i + 1] - starts[i] for i in rows)], device=device)
    row = torch.tensor(rows, device=device)
    changes = {name: getattr(problem, name)[tokens] for name in ("query", "key", "value")}
    changes |= {name: getattr(problem, name)[row] for name in ("block_table", "context_len")}
    return replace(problem, query_start=lengths.cumsum(0).int(), **changes), tokens


@sized("window", WINDOWS, WINDOWS)
def test_a_prompt_has_the_same_bits_in_chunks_that_end_at_pages(window, small, device):
    length = 96 if small else 1600
    case = shaped(((0, length),), window, small)
    problem = build(case, device)
    whole = attend(problem, case, deterministic=True)
    assert_close(whole, problem)
    pages = -(-length // case.page_size)
    shape = pages, case.page_size, *problem.key.shape[1:]
    caches = [new.new_zeros(shape) for new in (problem.key, problem.value)]
    for cache, new in zip(caches, (problem.key, problem.value), strict=True):
        cache.view(-1, *new.shape[1:])[:length] = new
    table = torch.arange(pages, dtype=torch.int32, device=device)[None]
    borders = [0, 2 * case.page_size, 3 * case.page_size, length]
    # single tokens too
    chunks = [*itertools.pairwise(borders), (case.page_size + 3, case.page_size + 4)]
    for first, last in [*chunks, (length - 1, length)]:
        rows = slice(first, last)
        part = replace(
            problem,
            query=problem.query[rows],
            key=problem.key[rows],
            value=problem.value[rows],
            key_cache=caches[0],
            value_cache=caches[1],
            block_table=table,
            query_start=torch.tensor([0, last - first], device=device).int(),
            context_len=torch.tensor([first], device=device).int(),
        )
        got = attend(part, case, deterministic=True)
        assert torch.equal(got, whole[rows]), f"positions {rows} in their own chunk: other bits"
