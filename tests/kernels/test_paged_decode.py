"""`paged_decode` against dense fp64 attention, split and unsplit."""

from dataclasses import replace

import pytest
import torch

from tcb.kernels import paged_decode
from tcb.kernels.contract import AttentionOptions, Decode
from tcb.kernels.gpu.launch import start
from tcb.kernels.gpu.paged_decode import plan_launches
from tcb.kernels.gpu.tuning import DeviceFacts
from tests.support.oracle import Case, assert_close, build, spread

HALF, BRAIN = torch.float16, torch.bfloat16
INF = float("inf")


def decode(*lengths, **fields):
    """A case of sequences of these lengths, the query's own position included."""
    return Case(tuple((length, 0) for length in lengths), decode=True, **fields)


MIXED = (1, 37, 0, 130, 64)
LENGTHS = [
    decode(1),
    decode(0),
    decode(15, 16, 17, 31, 32, 33, 63, 64, 65),
    decode(700, 3),
    decode(700, 0, 3, num_splits=1),
    *(decode(*MIXED, num_splits=splits) for splits in (1, 2, 3, 5)),
    decode(300, 0, heads=1, kv_heads=1, num_splits=128),
]
SHAPES = [
    decode(*MIXED, heads=4, kv_heads=4),
    decode(*MIXED, heads=5, kv_heads=1, dim=32, num_splits=2),
    decode(*MIXED, heads=14, kv_heads=2),
    decode(*MIXED, heads=12, kv_heads=1),
    decode(*MIXED, heads=16, kv_heads=1, num_splits=2),
    decode(*MIXED, heads=20, kv_heads=1),
    decode(70, 20, heads=64, kv_heads=2),
    decode(70, 20, dim=80, num_splits=2),
    decode(70, 20, dim=96),
    decode(70, 20, dim=112, num_splits=2),
    decode(70, 20, dim=128, dtype=HALF),
    decode(70, 20, dim=192, value_dim=128, kv_heads=4, num_splits=2),
    decode(70, 20, dim=256, dtype=HALF, num_splits=2),
    decode(70, 20, dim=16, value_dim=64),
    decode(70, 20, dim=64, value_dim=24, num_splits=2),
    decode(70, 20, dim=8),
]
PAGES = [
    *(decode(*MIXED, page_size=size) for size in (4, 8, 12, 32, 64, 96, 256)),
    *(decode(*MIXED, page_size=size, window=13) for size in (4, 12, 32, 64)),
    decode(*MIXED, page_size=16, packed=True, dtype=HALF, num_splits=3),
    decode(*MIXED, page_size=64, packed=True, window=30),
]
MASKS = [
    *(decode(100, 31, 7, window=window) for window in (1, 2, 31, 32, 33, 99, 100, 101)),
    decode(300, 65, 0, window=70, page_size=8, num_splits=4),
    decode(300, 65, 0, window=70, num_splits=1),
    decode(*MIXED, softcap=30.0),
    decode(*MIXED, softcap=30.0, magnitude=1e4, num_splits=3),
    decode(*MIXED, softcap=50.0, magnitude=1e-3),
    *(
        decode(*MIXED, sinks=sinks, num_splits=splits)
        for sinks in (0.5, 40.0, -INF)
        for splits in (1, 3)
    ),
    decode(*MIXED, sinks=1.0, softcap=20.0, window=50, num_splits=2),
    decode(*MIXED, scale=0.7, dtype=HALF, num_splits=2),
    decode(*MIXED, magnitude=300.0, dtype=HALF, num_splits=3),
    decode(*MIXED, sinks=1.0, softcap=20.0, window=50, dtype=BRAIN, dim=64, num_splits=2),
]


def attend(problem, case, **options):
    return paged_decode(
        problem.query,
        problem.key_cache,
        problem.value_cache,
        problem.block_table,
        problem.context_len,
        window=case.window,
        softcap=case.softcap,
        sinks=problem.sinks,
        scale=case.scale,
        num_splits=case.num_splits,
        **options,
    )


@pytest.mark.parametrize("case", LENGTHS + SHAPES + PAGES + MASKS, ids=str)
def test_values(case, device):
    problem = build(case, device)
    assert_close(attend(problem, case), problem)


SMALL = decode(40, 0, 9, num_splits=2)


@pytest.mark.parametrize("splits", [1, 3])
def test_out_is_written_in_place_and_nothing_beside_it(splits, device):
    case = replace(SMALL, num_splits=splits)
    problem = build(case, device)
    sequences, heads, dim = problem.query.shape
    around = torch.full((sequences, heads + 2, dim + 16), 7.0, device=device)
    out = around[:, 1:-1, 8:-8].fill_(float("nan"))
    assert attend(problem, case, out=out) is out
    assert_close(out, problem)
    assert not out[1].any()
    out.fill_(7.0)
    assert (around == 7.0).all()


def test_no_sequence(device):
    problem = build(SMALL, device)
    none = {name: getattr(problem, name)[:0] for name in ("query", "block_table", "context_len")}
    assert attend(replace(problem, **none), SMALL).shape == (0, 4, 16)


def launches_of(problem, case, facts):
    return plan_launches(
        facts,
        Decode(
            problem.query,
            problem.key_cache,
            problem.value_cache,
            problem.block_table,
            problem.context_len,
            AttentionOptions(case.window, softcap=None, sinks=None, scale=None),
            case.num_splits,
            torch.empty_like(problem.query),
        ),
    )


@pytest.mark.parametrize(("name", "residency"), [("sm_80", 2), ("sm_90", 3)])
def test_parts_fill_the_programs_that_a_processor_holds(name, residency, device):
    case = decode(320, 320, heads=8, kv_heads=2, dim=64, dtype=HALF)
    problem = build(case, device)
    parts = next(launches_of(problem, case, DeviceFacts(name, 16)))
    # two sequences of two key-value heads
    assert parts.arguments[9] == 16 * residency // 4
    assert parts.programs == 16 * residency


def test_parts_cover_what_the_window_leaves(device):
    # tiles of 32 keys: the window leaves four
    case = decode(320, window=128, num_splits=4, heads=2, kv_heads=1)
    problem = build(case, device)
    parts = next(launches_of(problem, case, DeviceFacts("interpreter", 4)))
    part_sum = parts.arguments[4].row_sum.fill_(0.0)
    start([parts], problem.query)
    # each part of both heads has its share of the keys, and so a sum of weights
    assert part_sum.shape[1] == 4
    assert (part_sum[:2] > 0).all()


def test_same_call_gives_the_same_bits(device):
    case = decode(*MIXED, sinks=1.0, softcap=20.0, window=50, dtype=HALF, num_splits=3)
    problem = build(case, device)
    assert torch.equal(attend(problem, case), attend(problem, case))


def test_offsets_beyond_int32(device):
    # 2 * 2**30 elements are more than an int32 counts
    case = decode(23, 0, 1, kv_heads=1, heads=2, page_size=32, dtype=HALF, num_splits=2)
    problem = build(case, device)
    far = replace(
        problem,
        query=spread(problem.query, 0, 2**30),
        key_cache=spread(problem.key_cache, 0, 2**30),
        value_cache=spread(problem.value_cache, 0, 2**30),
        block_table=spread(problem.block_table, 0, 2**30),
    )
    out = spread(torch.full_like(problem.query, float("nan")), 0, 2**30)
    assert_close(attend(far, case, out=out), problem)


WRONG = [
    ("query", lambda p: {"query": p.query[0]}),
    ("query", lambda p: {"query": p.query[:, :3]}),
    ("key_cache", lambda p: {"key_cache": p.key_cache[0]}),
    ("key_cache", lambda p: {"key_cache": p.key_cache.half()}),
    ("value_cache", lambda p: {"value_cache": p.value_cache.transpose(2, 3)}),
    ("block_table", lambda p: {"block_table": p.block_table[1:]}),
    ("seq_len", lambda p: {"context_len": p.context_len[1:]}),
    ("sinks", lambda p: {"sinks": torch.zeros(4, dtype=torch.int32, device=p.query.device)}),
]


@pytest.mark.parametrize(
    ("name", "change"), WRONG, ids=[f"{n}{i}" for i, (n, _) in enumerate(WRONG)]
)
def test_wrong_tensors_are_refused_by_name(name, change, device):
    problem = build(SMALL, device)
    with pytest.raises(ValueError, match=f"^{name}:"):
        attend(replace(problem, **change(problem)), SMALL)


def test_the_former_name_of_seq_len_is_accepted(device):
    problem = build(SMALL, device)
    tensors = problem.query, problem.key_cache, problem.value_cache, problem.block_table
    out = paged_decode(*tensors, context_len=problem.context_len, num_splits=2)
    assert_close(out, problem)
    with pytest.raises(TypeError, match="seq_len: given twice"):
        paged_decode(*tensors, seq_len=problem.context_len, context_len=problem.context_len)


@pytest.mark.parametrize(
    "options", [{"window": 0}, {"softcap": -1.0}, {"num_splits": 0}, {"num_splits": 129}], ids=str
)
def test_wrong_options_are_refused_by_name(options, device):
    (name,) = options
    with pytest.raises(ValueError, match=f"^{name}:"):
        attend(build(SMALL, device), replace(SMALL, **options))
