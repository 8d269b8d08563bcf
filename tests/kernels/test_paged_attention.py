"""`paged_attention` against dense fp64 attention, wherever a paged kernel can go wrong."""

from dataclasses import replace

import pytest
import torch

from tcb.kernels import paged_attention
from tests.support.oracle import Case, assert_close, build, spread

HALF, BRAIN = torch.float16, torch.bfloat16
INF = float("inf")


LENGTHS = [
    Case(((0, 1),)),
    Case(((2, 1),)),
    Case(((0, 2),)),
    Case(((13, 5),)),
    Case(((0, 17),), page_size=4),
    Case(((170, 65),), heads=2),
    Case(((700, 1),)),
    Case(((460, 3),), page_size=64),
    Case(((2, 201),), heads=1, kv_heads=1),
    Case(((15, 1), (16, 1), (17, 1), (31, 33), (32, 32), (33, 31))),
    Case(((0, 40), (0, 0), (7, 0), (90, 3), (0, 1), (0, 0)), padding=5),
    Case(((300, 1), (0, 1), (1, 1), (0, 2), (5, 1), (0, 1), (64, 1), (3, 1))),
]
SHAPES = [
    Case(((9, 20), (40, 1)), heads=4, kv_heads=4),
    Case(((9, 20), (40, 1)), heads=5, kv_heads=1, dim=32),
    Case(((9, 20), (40, 1)), heads=14, kv_heads=2),
    Case(((9, 20), (40, 1)), heads=12, kv_heads=1),
    Case(((9, 20), (40, 1)), heads=16, kv_heads=1),
    Case(((9, 9), (40, 1)), heads=20, kv_heads=1),
    Case(((9, 9), (40, 1)), heads=32, kv_heads=1),
    Case(((9, 20), (40, 1)), dim=80, heads=2, kv_heads=1),
    Case(((9, 20), (40, 1)), dim=96, heads=2, kv_heads=1, page_size=32),
    Case(((9, 20), (40, 1)), dim=112, heads=2, kv_heads=1),
    Case(((9, 20), (40, 1)), dim=128, heads=2, kv_heads=1, dtype=HALF),
    Case(((9, 20), (40, 1)), dim=192, value_dim=128, heads=2, kv_heads=2),
    Case(((9, 20), (40, 1)), dim=256, heads=2, kv_heads=1, dtype=HALF),
    Case(((9, 20), (40, 1)), dim=16, value_dim=64, packed=False),
    Case(((9, 20), (40, 1)), dim=64, value_dim=24),
    Case(((9, 20), (40, 1)), dim=8),
]
PAGES = [
    *(Case(((75, 20), (40, 1), (0, 9)), page_size=size) for size in (4, 8, 12, 32, 64, 96, 256)),
    *(Case(((75, 20), (40, 1)), page_size=size, window=13) for size in (4, 12, 32, 64)),
    Case(((75, 20), (40, 1)), page_size=16, packed=True, dtype=HALF),
    Case(((75, 20), (40, 1)), page_size=64, packed=True, window=30),
]
MASKS = [
    *(Case(((60, 40), (31, 1)), window=window) for window in (1, 2, 31, 32, 33, 99, 100, 101)),
    Case(((150, 40), (300, 2)), window=70, page_size=8),
    Case(((0, 100), (3, 50)), window=16),
    Case(((60, 40), (31, 1)), softcap=30.0),
    Case(((60, 40), (31, 1)), softcap=30.0, magnitude=1e4),
    Case(((60, 40), (31, 1)), softcap=50.0, magnitude=1e-3),
    Case(((60, 40), (31, 1)), sinks=0.5),
    Case(((60, 40), (31, 1)), sinks=40.0),
    Case(((60, 40), (31, 1)), sinks=-INF),
    Case(((60, 40), (31, 1)), sinks=1.0, softcap=20.0, window=25),
    Case(((60, 40), (31, 1)), scale=0.7, dtype=HALF),
    Case(((60, 40), (31, 1)), magnitude=300.0, dtype=HALF),
    Case(((60, 40), (31, 1)), sinks=1.0, softcap=20.0, window=25, dtype=HALF, dim=64),
    Case(((60, 40), (31, 1)), window=25, dtype=BRAIN, dim=64, packed=True),
]


def attend(problem, case, **options):
    return paged_attention(
        *problem.chunks,
        window=case.window,
        softcap=case.softcap,
        sinks=problem.sinks,
        scale=case.scale,
        **options,
    )


@pytest.mark.parametrize("case", LENGTHS + SHAPES + PAGES + MASKS, ids=str)
def test_values(case, device):
    problem = build(case, device)
    out = attend(problem, case)
    assert_close(out, problem)
    # rows of no sequence
    assert not out[len(problem.expected) :].any()


SMALL = Case(((20, 9), (40, 1), (0, 5)), padding=3)


def test_out_is_written_in_place_and_padding_left_alone(device):
    problem = build(SMALL, device)
    tokens, heads, dim = problem.query.shape
    around = torch.full((tokens, heads + 2, dim + 16), 7.0, device=device)
    out = around[:, 1:-1, 8:-8]
    out[: len(problem.expected)] = float("nan")
    assert attend(problem, SMALL, out=out) is out
    assert_close(out, problem)
    around[: len(problem.expected), 1:-1, 8:-8] = 7.0
    assert (around == 7.0).all()


def test_no_token_and_no_sequence(device):
    problem = build(Case(((0, 0), (5, 0))), device)
    assert attend(problem, SMALL).shape == (0, 4, 16)
    nobody = replace(
        build(SMALL, device),
        block_table=problem.block_table[:0],
        query_start=torch.zeros(1, dtype=torch.int32, device=device),
        context_len=problem.context_len[:0],
    )
    assert not attend(nobody, SMALL).any()


def test_first_token_of_the_batch_is_padding(device):
    problem = build(SMALL, device)
    shifted = replace(
        problem,
        query=problem.query.roll(3, 0),
        key=problem.key.roll(3, 0),
        value=problem.value.roll(3, 0),
        query_start=problem.query_start + 3,
    )
    out = attend(shifted, SMALL)
    assert not out[:3].any()
    assert_close(out.roll(-3, 0), problem)


def test_same_call_gives_the_same_bits(device):
    case = Case(((60, 40), (31, 1)), sinks=1.0, softcap=20.0, window=25, dtype=HALF)
    problem = build(case, device)
    assert torch.equal(attend(problem, case), attend(problem, case))


def test_offsets_beyond_int32(device):
    # 2 * 2**30 elements are more than an int32 counts
    case = Case(((20, 3), (5, 2)), kv_heads=1, heads=2, page_size=32, dtype=HALF)
    problem = build(case, device)
    far = replace(
        problem,
        query=spread(problem.query, 0, 2**30),
        key=spread(problem.key, 0, 2**30),
        value=spread(problem.value, 0, 2**30),
        key_cache=spread(problem.key_cache, 0, 2**30),
        value_cache=spread(problem.value_cache, 0, 2**30),
    )
    out = spread(torch.full_like(problem.query, float("nan")), 0, 2**30)
    assert_close(attend(far, case, out=out), problem)


WRONG = [
    ("query", lambda p: {"query": p.query[0]}),
    ("query", lambda p: {"query": p.query.double()}),
    ("query", lambda p: {"query": p.query[:, :3]}),
    ("key", lambda p: {"key": p.key[1:]}),
    ("value", lambda p: {"value": p.value.transpose(1, 2)}),
    ("key_cache", lambda p: {"key_cache": p.key_cache[..., :8]}),
    ("value_cache", lambda p: {"value_cache": p.value_cache[:, :5]}),
    ("value_cache", lambda p: {"value_cache": p.value_cache.half()}),
    ("block_table", lambda p: {"block_table": p.block_table.long()}),
    ("block_table", lambda p: {"block_table": p.block_table[:, :0]}),
    ("query_start", lambda p: {"query_start": p.query_start[1:]}),
    ("context_len", lambda p: {"context_len": p.context_len.long()}),
    ("sinks", lambda p: {"sinks": torch.zeros(3, device=p.query.device)}),
]


@pytest.mark.parametrize(
    ("name", "change"), WRONG, ids=[f"{n}{i}" for i, (n, _) in enumerate(WRONG)]
)
def test_wrong_tensors_are_refused_by_name(name, change, device):
    problem = build(SMALL, device)
    with pytest.raises(ValueError, match=f"^{name}:"):
        attend(replace(problem, **change(problem)), SMALL)


@pytest.mark.parametrize(
    "options", [{"window": 0}, {"softcap": 0.0}, {"scale": -1.0}, {"scale": INF}], ids=str
)
def test_wrong_options_are_refused_by_name(options, device):
    (name,) = options
    with pytest.raises(ValueError, match=f"^{name}:"):
        attend(build(SMALL, device), replace(SMALL, **options))


@pytest.mark.parametrize("shape", [(3, 4, 16), (38, 4, 8)], ids=str)
def test_wrong_out_is_refused(shape, device):
    with pytest.raises(ValueError, match=r"^out:"):
        attend(build(SMALL, device), SMALL, out=torch.empty(shape, device=device))
