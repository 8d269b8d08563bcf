"""Workloads and contenders of the measurement for accelerators: floors, pages, who is asked what.

FlashAttention, torch's and the third, are asked through stand-ins that take the same names and
arguments and compute what those compute, so that a wrong length, table or window shows on a CPU.
"""

import sys
from types import SimpleNamespace

import pytest
import torch

from bench import kernels
from bench.lib import contenders
from bench.lib.attention import WORKLOADS, Tensors, build, reduced
from tests.support.oracle import Case, attend

CPU = torch.device("cpu")
SMALL = tuple(map(reduced, WORKLOADS))
MIXED = SMALL[2]


# workloads and floors


def figures(workload):
    return workload.bytes_moved() / 1e9, workload.flop() / 1e9


@pytest.mark.parametrize(
    ("workload", "gigabytes", "gigaflop"),
    # a layer of 32 query and 8 key-value heads of 128 in bf16: keys and values once, queries and
    # outputs; four times the head size for each pair of a query and a key
    [
        pytest.param(WORKLOADS[0], 1.075, 4.295, id="decode"),
        pytest.param(WORKLOADS[1], 0.336, 275.0, id="prefill"),
        pytest.param(WORKLOADS[2], 1.058, 107.1, id="mixed"),
        pytest.param(WORKLOADS[3], 0.270, 1.074, id="window"),
    ],
)
def test_floors_are_those_worked_out_by_hand(workload, gigabytes, gigaflop):
    assert figures(workload) == pytest.approx((gigabytes, gigaflop), rel=2e-3)


@pytest.mark.parametrize("workload", SMALL, ids=lambda workload: workload.name)
def test_pages_hold_what_the_contiguous_keys_hold(workload):
    tensors = build(workload, CPU)
    columns = tensors.block_table.shape[1]
    for row, (context, new) in enumerate(workload.sequences):
        first = int(tensors.key_start[row])
        for place, position in enumerate(range(workload.first_key(context), context + new)):
            block = tensors.block_table[row, position // workload.page_size % columns]
            slot = position % workload.page_size
            assert torch.equal(tensors.key_cache[block, slot], tensors.keys[first + place])
            assert torch.equal(tensors.value_cache[block, slot], tensors.values[first + place])


# contenders


def dense(workload, tensors):
    """What every contender must return, from the contiguous keys."""
    rows = []
    for i in range(len(workload.sequences)):
        query = tensors.query[tensors.query_start[i] : tensors.query_start[i + 1]]
        kept = slice(int(tensors.key_start[i]), int(tensors.key_start[i + 1]))
        case = Case((), window=workload.window)
        parts = tensors.keys[kept], tensors.values[kept]
        rows.append(attend(query, *parts, case, None, torch.float64))
    return torch.cat(rows)


def assert_same(out, wanted):
    assert torch.isfinite(out).all()
    # two roundings of bf16
    assert kernels.difference(out, wanted) < 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("name", ["tcb", "tcb, one call", "tcb, overlapped", "sdpa"])
@pytest.mark.parametrize("workload", SMALL, ids=lambda workload: workload.name)
def test_contenders_that_run_on_a_cpu_agree(name, workload):
    tensors = build(workload, CPU)
    try:
        call = contenders.CONTENDERS[name](workload, tensors)
    except contenders.CannotRun as reason:
        mixed = workload.num_decodes and workload.num_chunks
        assert name != "tcb" and (name == "sdpa" or not mixed), reason
        return
    assert call().shape == tensors.query.shape
    assert_same(contenders.tcb(workload, tensors)(), dense(workload, tensors))
    if name == "sdpa":
        assert_same(call(), dense(workload, tensors))


@pytest.mark.parametrize("name", ["tcb, shared list", "tcb, batch-invariant"])
def test_contenders_that_need_the_kernels_say_so_where_torch_stands_in(name):
    with pytest.raises(contenders.CannotRun, match="torch operations"):
        contenders.CONTENDERS[name](MIXED, build(MIXED, CPU))


def varlen(query, keys, values, query_start, key_start, window_left):
    """Attention of packed sequences as FlashAttention defines it: causal, bottom-right."""
    window = None if window_left in (None, -1) else window_left + 1
    rows = []
    for i in range(len(query_start) - 1):
        part = slice(int(query_start[i]), int(query_start[i + 1]))
        kept = slice(int(key_start[i]), int(key_start[i + 1]))
        case = Case((), window=window)
        rows.append(attend(query[part], keys[kept], values[kept], case, None, torch.float64))
    return torch.cat(rows).to(query.dtype)


def gathered(pool, table, lengths):
    """The first positions of each sequence, out of its pages."""
    rows = [pool[table[i].long()].flatten(0, 1)[:length] for i, length in enumerate(lengths)]
    return torch.cat(rows)


def fake_flash_attention_3(calls):
    """A stand-in with the names and order of arguments of `flash_attn_interface`."""

    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        qv=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        page_table=None,
        cu_seqlens_q=None,
        cu_seqlens_k_new=None,
        max_seqlen_q=None,
        rotary_seqlens=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
    ):
        calls.append(max_seqlen_q)
        assert causal and window_size[1] == (0 if window_size[0] >= 0 else -1)
        assert page_table.dtype == cache_seqlens.dtype == cu_seqlens_q.dtype == torch.int32
        lengths = cache_seqlens.tolist()
        keys, values = (gathered(pool, page_table, lengths) for pool in (k_cache, v_cache))
        start = torch.tensor([0, *lengths]).cumsum(0)
        return varlen(q, keys, values, cu_seqlens_q, start, window_size[0])

    return SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)


@pytest.mark.parametrize("workload", SMALL, ids=lambda workload: workload.name)
def test_flash_attention_3_is_asked_for_the_same_function(workload, monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake_flash_attention_3(calls))
    tensors = build(workload, CPU)
    out = contenders.flash_attention_3(workload, tensors)()
    assert_same(out, dense(workload, tensors))
    assert calls == [max(new for _, new in workload.sequences)]


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("workload", SMALL, ids=lambda workload: workload.name)
def test_torch_flash_attention_is_asked_for_the_same_function(workload, paged, monkeypatch):
    schema = torch.ops.aten._flash_attention_forward.default._schema
    names = [argument.name for argument in schema.arguments if not argument.kwarg_only]

    def fake(*args, **options):
        given = dict(zip(names, args, strict=True)) | options
        assert given["is_causal"] and not given["return_debug_mask"] and not given["dropout_p"]
        keys, values, start = given["key"], given["value"], given["cum_seq_k"]
        table = given.get("block_table")
        if table is not None:
            lengths = given["seqused_k"].tolist()
            keys, values = (gathered(pool, table, lengths) for pool in (keys, values))
        assert given["max_k"] == int(start.diff().max())
        assert given["max_q"] == int(given["cum_seq_q"].diff().max())
        window = given.get("window_size_left")
        assert given.get("window_size_right") == (None if window is None else 0)
        return [varlen(given["query"], keys, values, given["cum_seq_q"], start, window)]

    fake._schema = schema
    monkeypatch.setattr(contenders, "flash_operation", fake)
    monkeypatch.setattr(contenders, "_TORCH_PAGE", workload.page_size)
    tensors = build(workload, CPU)
    call = contenders.torch_flash_paged if paged else contenders.torch_flash
    assert_same(call(workload, tensors)(), dense(workload, tensors))


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_torch_knows_the_arguments_of_its_flash_attention(paged, monkeypatch):
    # the meta device checks names, kinds and number of arguments against the operation itself
    tensors = build(MIXED, CPU)
    on_meta = Tensors(*(getattr(tensors, name).to("meta") for name in Tensors.__slots__))
    monkeypatch.setattr(contenders, "_TORCH_PAGE", MIXED.page_size)
    call = contenders.torch_flash_paged if paged else contenders.torch_flash
    out = call(MIXED, on_meta)()
    assert out.shape == tensors.query.shape
