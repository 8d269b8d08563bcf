"""Attention in torch operations, against the oracle and in the ways that a step can go stale."""

import threading
from dataclasses import replace

import pytest
import torch

from tcb.kernels.cpu import attention as torch_attention
from tcb.kernels.cpu import operations as torch_ops
from tests.support.oracle import Case, assert_close, build

HALF, BRAIN = torch.float16, torch.bfloat16
CPU = torch.device("cpu")

# contexts of decode: one page and many, padding rows, lengths that make several rectangles
LENGTHS = [
    (1,),
    (0, 0),
    (16, 17, 15),
    (33, 0, 5, 0, 64),
    (9,) * 12,
    (700, 3, 250, 90, 1, 0, 31, 40, 38, 36, 700),
]
# (context, new tokens): each way of attending a chunk alone, then together
CHUNKS = [
    ((0, 1),),
    ((0, 40),),
    ((5, 1),),
    ((37, 1), (16, 1), (250, 1), (3, 1)),
    ((0, 12),) * 5,
    ((0, 12), (0, 11), (0, 10), (0, 3), (0, 1), (0, 0)),
    ((17, 9), (64, 30)),
    ((0, 20), (30, 1), (0, 0), (41, 7), (0, 20), (8, 1), (0, 19), (200, 1)),
]
SHAPES = [
    {},
    {"heads": 3, "kv_heads": 3},
    {"heads": 9, "kv_heads": 3, "dim": 64},
    {"heads": 5, "kv_heads": 1, "dim": 24},
    {"value_dim": 40},
    {"page_size": 1},
    {"page_size": 12},
    {"page_size": 256},
    {"packed": True},
    {"dtype": HALF},
    {"dtype": BRAIN, "packed": True},
]
OPTIONS = [
    {"window": 1},
    {"window": 2},
    {"window": 16},
    {"window": 39},
    {"window": 1000},
    {"softcap": 20.0},
    {"softcap": 30.0, "magnitude": 1e4},
    {"sinks": 0.5},
    {"sinks": 40.0},
    {"sinks": float("-inf")},
    {"scale": 0.7},
    {"window": 20, "softcap": 15.0, "sinks": -1.0, "value_dim": 24, "dtype": HALF},
]


def decode(problem, case, **given):
    options = {"window": case.window, "softcap": case.softcap, "scale": case.scale, **given}
    return torch_ops.paged_decode(
        problem.query,
        problem.key_cache,
        problem.value_cache,
        problem.block_table,
        problem.context_len,
        sinks=problem.sinks,
        **options,
    )


def attend(problem, case, **given):
    options = {"window": case.window, "softcap": case.softcap, "scale": case.scale, **given}
    return torch_ops.paged_attention(
        *problem.chunks,
        sinks=problem.sinks,
        **options,
    )


def decode_case(lengths, **fields):
    return Case(tuple((length, 0) for length in lengths), decode=True, **fields)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("fields", [*SHAPES, *OPTIONS], ids=str)
def test_decode(lengths, fields):
    case = decode_case(lengths, **fields)
    problem = build(case, CPU)
    out = decode(problem, case)
    assert out.dtype == case.dtype
    assert_close(out, problem)
    given = torch.full((len(out), case.heads * 2, out.shape[2]), float("nan"), dtype=case.dtype)
    given = given[:, ::2]
    assert decode(problem, case, out=given) is given
    assert torch.equal(given, out)


@pytest.mark.parametrize("sequences", CHUNKS, ids=str)
@pytest.mark.parametrize("fields", [*SHAPES, *OPTIONS], ids=str)
def test_chunks(sequences, fields):
    case = Case(sequences, padding=3, **fields)
    problem = build(case, CPU)
    out = attend(problem, case)
    assert out.dtype == case.dtype
    assert_close(out, problem)
    assert not out[len(problem.expected) :].any()
    given = torch.full_like(out, float("nan"))
    assert attend(problem, case, out=given) is given
    assert torch.equal(given[:-3], out[:-3])
    assert given[-3:].isnan().all()


@pytest.mark.parametrize("fields", [{}, {"window": 23}, {"sinks": 1.0}, {"softcap": 9.0}], ids=str)
def test_tiles_of_queries_meet(monkeypatch, fields):
    monkeypatch.setattr(torch_attention, "_MOST_QUERIES", 7)
    monkeypatch.setattr(torch_attention, "_FEWEST_QUERIES", 5)
    monkeypatch.setattr(torch_attention, "_MOST_SCORES", 1000)
    case = Case(((0, 60), (19, 33), (80, 8)), **fields)
    problem = build(case, CPU)
    assert_close(attend(problem, case), problem)


def test_layers_share_what_their_integers_say(monkeypatch):
    case = Case(((0, 9), (30, 1), (17, 4)))
    calls = []
    sort_chunks = torch_attention.sort_chunks
    monkeypatch.setattr(torch_attention, "_memo", torch_attention.StepMemo())
    monkeypatch.setattr(
        torch_attention, "sort_chunks", lambda *given: calls.append(given) or sort_chunks(*given)
    )
    problem = build(case, CPU)
    other = replace(problem, value_cache=problem.value_cache * 2, value=problem.value * 2)
    first = attend(problem, case)
    assert torch.equal(attend(other, case), first * 2)
    assert len(calls) == 1


def test_integers_may_change_where_they_are():
    # .data leaves no trace in a tensor's version, nor does a write through numpy
    case = decode_case((33, 20, 48))
    problem = build(case, CPU)
    before = decode(problem, case)
    order = torch.tensor([2, 0, 1])
    problem.context_len.data.copy_(problem.context_len[order])
    problem.block_table.numpy()[:] = problem.block_table[order].numpy()
    moved = replace(problem, query=problem.query[order])
    assert torch.equal(decode(moved, case), before[order])


def test_inference_mode_and_gradients_may_alternate():
    case = Case(((0, 9), (30, 1), (17, 4)))
    problem = build(case, CPU)
    with torch.inference_mode():
        inside = attend(problem, case)
    problem.query.requires_grad_()
    outside = attend(problem, case)
    assert torch.equal(inside, outside)
    assert not outside.requires_grad
    with torch.inference_mode():
        assert torch.equal(attend(problem, case), inside)


def test_threads_do_not_share_scratch():
    case = decode_case((700, 3, 250, 90))
    problem = build(case, CPU)
    others = [replace(problem, query=problem.query * factor) for factor in (0.5, 1.0, 2.0)]
    wanted = [decode(other, case) for other in others]
    wrong = []

    def run(other, right):
        for _ in range(50):
            if not torch.equal(decode(other, case), right):
                wrong.append(other)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(others, wanted, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_one_sequence_full_of_nan_leaves_the_others():
    case = decode_case((40, 25, 33, 70))
    problem = build(case, CPU)
    right = decode(problem, case)
    block = problem.block_table[1, 0]
    problem.key_cache[block, 3] = float("nan")
    problem.value_cache[block, 4] = float("inf")
    broken = decode(problem, case)
    assert broken[1].isnan().all()
    # and what it left in the scratch is gone with it
    problem.key_cache[block, 3] = problem.value_cache[block, 4] = 0
    after = decode(problem, case)
    for out in (broken, after):
        assert torch.equal(out[[0, 2, 3]], right[[0, 2, 3]])
    assert after.isfinite().all()


def test_one_sequence_may_fill_the_cache():
    # one list with its extra columns is longer than the cache has keys
    case = Case(((32, 1),), heads=2, kv_heads=1, sinks=0.5)
    problem = build(case, CPU)
    blocks = problem.block_table[0].long()
    full = replace(
        problem,
        key_cache=problem.key_cache[blocks[:2]],
        value_cache=problem.value_cache[blocks[:2]],
        block_table=torch.tensor([[0, 1, -1]], dtype=torch.int32),
    )
    assert_close(attend(full, case), problem)


def test_a_short_table_reads_nothing_outside_the_cache():
    case = decode_case((16, 16))
    problem = build(case, CPU)
    longer = replace(problem, context_len=torch.tensor([16, 16 * 40], dtype=torch.int32))
    longer.block_table[1] = -1
    assert torch.equal(decode(longer, case)[0], decode(problem, case)[0])
