"""The reference is right: beside torch's own attention, transformers' warpers and cases by hand.

What the oracle, and with it the kernels, are held to rests on these.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tcb.kernels import reference
from tests.support.oracle import Case, build

CPU = torch.device("cpu")
SHAPES = [(5, 5, 2, 2), (1, 9, 4, 2), (7, 20, 6, 1), (3, 3, 9, 3), (0, 4, 2, 1)]


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def same(left, right):
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tokens, length, heads, kv_heads", SHAPES)
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_is_that_of_torch_with_the_mask_written_out(
    tokens, length, heads, kv_heads, window, scale, sinks
):
    query, keys = normal(tokens, heads, 8), normal(length, kv_heads, 8)
    values = normal(length, kv_heads, 6)
    sink = normal(heads) if sinks else None
    mask = torch.full((heads, tokens, length + 1), -math.inf, dtype=torch.float64)
    for token in range(tokens):
        position = length - tokens + token
        mask[:, token, max(0, position + 1 - (window or length)) : position + 1] = 0
        if sinks:
            # a key of nothing but zeros has the score 0, and here the sink's
            mask[:, token, length] = sink
    # query head h reads the key head h // group
    keys_of_heads, values_of_heads = (
        torch.stack(
            [F.pad(part, (0, 0, 0, 0, 0, 1))[:, h * kv_heads // heads] for h in range(heads)]
        )
        for part in (keys, values)
    )
    wanted = F.scaled_dot_product_attention(
        query.transpose(0, 1), keys_of_heads, values_of_heads, mask, scale=scale
    ).transpose(0, 1)
    same(reference.attend(query, keys, values, window=window, scale=scale, sinks=sink), wanted)


def test_attention_of_a_case_by_hand():
    # two query heads of one key head; products 0, 2 and 0, 4, a softcap of 3 and a sink of ln 2
    query, keys = torch.tensor([[[1.0], [2.0]]]).double(), torch.tensor([[[0.0]], [[2.0]]]).double()
    values, sinks = (
        torch.tensor([[[10.0]], [[20.0]]]).double(),
        torch.tensor([math.log(2)] * 2, dtype=torch.float64),
    )
    for sink, rest in ((None, 0.0), (sinks, 2.0)):
        for cap in (None, 3.0):
            second = [math.exp(cap * math.tanh(x / cap) if cap else x) for x in (2.0, 4.0)]
            wanted = [(10 + 20 * weight) / (1 + weight + rest) for weight in second]
            found = reference.attend(query, keys, values, softcap=cap, sinks=sink, scale=1.0)
            assert found.flatten().tolist() == pytest.approx(wanted, rel=1e-14)


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    "fields", [{}, {"window": 1}, {"window": 13}, {"softcap": 5.0}, {"sinks": 0.5}], ids=str
)
def test_pages_hold_what_a_dense_sequence_holds(decode, page_size, fields):
    sequences = ((40, 0), (0, 0), (7, 0), (1, 0)) if decode else ((33, 6), (0, 5), (0, 0), (20, 1))
    case = Case(sequences, decode=decode, page_size=page_size, value_dim=24, **fields)
    problem = build(case, CPU)
    tensors = (problem.query, *problem.chunks[3:]) if decode else problem.chunks
    if decode:
        tensors = [tensor for tensor in tensors if tensor is not problem.query_start]
    tensors = [part.double() if part.is_floating_point() else part for part in tensors]
    operation = reference.paged_decode if decode else reference.paged_attention
    masks = {"window": case.window, "softcap": case.softcap, "sinks": problem.sinks}
    same(operation(*tensors, **masks), problem.expected)


def test_padding_tokens_give_zero():
    problem = build(Case(((3, 2),), padding=2), CPU)
    assert not reference.paged_attention(*problem.chunks)[2:].any()


def test_tables_and_slots_of_a_case_by_hand():
    # a ring of two columns and a table of three; pages of 4; a padding row between two sequences
    ring, full = torch.tensor([[5, 6], [1, 2]]), torch.full((2, 3), -1)
    edits = (
        torch.tensor([9, 7, 8]),
        torch.tensor([0, 1, 1, 1, 3, 3, 3]),
        torch.tensor([3, 0, 0, 0, 0, 0]),
    )
    lengths = torch.tensor([0, 3, 4, 6]), torch.tensor([11, 0, 2])
    # the first sequence: its page 3 to column 1 of the ring, pages 0 and 1 to the table
    slot, seen = reference.page_tables(
        [ring, full], *edits, torch.tensor([1, -1, 0]), *lengths, page_size=4, num_pages=2
    )
    assert ring.tolist() == [[5, 6], [1, 9]]
    assert full.tolist() == [[-1, -1, -1], [7, 8, -1]]
    # positions 11, 12, 13 lie on pages 2, 3, 3, positions 2, 3 on page 0
    assert slot.tolist() == [[4 + 3, 36, 37, -1, 22, 23], [-1, 28, 29, -1, -1, -1]]
    assert [table.tolist() for table in seen] == [
        [[1, 9], [-1, -1], [5, 6]],
        [[7, 8], [-1, -1], [-1, -1]],
    ]


def test_slots_and_blocks_of_a_case_by_hand():
    new, cache = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1), torch.zeros(2, 3, 1, 1)
    reference.write_kv(
        new, 10 * new, cache, twin := torch.zeros(2, 3, 1, 1), torch.tensor([4, -1, 0])
    )
    assert cache.flatten().tolist() == [3, 0, 0, 0, 1, 0]
    assert torch.equal(twin, 10 * cache)
    pool, out = torch.arange(8.0).view(4, 2), torch.empty(2, 2)
    reference.copy_blocks(pool, torch.tensor([0, 0]), torch.tensor([3, 1]))
    assert pool.tolist() == [[0, 1], [0, 1], [4, 5], [0, 1]]
    reference.gather_blocks(pool, torch.tensor([2, 1]), out)
    assert out.tolist() == [[4, 5], [0, 1]]
    reference.scatter_blocks(out, pool, torch.tensor([0, 3]))
    assert pool.tolist() == [[4, 5], [0, 1], [4, 5], [0, 1]]


@pytest.mark.parametrize("top_k", [0, 1, 7, 100])
@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_filters_are_the_warpers_of_transformers(top_k, top_p, min_p, temperature):
    logits = normal(1, 60) * 2
    wanted = logits / temperature
    if top_k:
        wanted = TopKLogitsWarper(min(top_k, 60))(None, wanted)
    if top_p < 1:
        wanted = TopPLogitsWarper(top_p)(None, wanted)
    if min_p:
        wanted = MinPLogitsWarper(min_p)(None, wanted)
    same(reference.filtered(logits[0], temperature, top_k, top_p, min_p), wanted.log_softmax(-1)[0])


def test_of_ties_top_k_keeps_all_and_top_p_the_first():
    # four of 1/4; a thousand alike
    few, many = torch.zeros(4, dtype=torch.float64), torch.zeros(1000, dtype=torch.float64)
    for logit, settings, kept in (
        (few, (1.0, 2, 1.0, 0.0), 4),
        (few, (1.0, 0, 0.5, 0.0), 2),
        (few, (1.0, 0, 0.51, 0.0), 3),
        (many, (1.0, 0, 0.4001, 0.0), 401),
    ):
        found = reference.filtered(logit, *settings) > -math.inf
        assert found.nonzero().flatten().tolist() == list(range(kept))


def test_a_draw_is_the_first_sum_above_its_uniform_number():
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64).log().expand(6, 4)
    uniform = torch.tensor([0.0, 0.099, 0.101, 0.699, 0.701, 0.5]).double()
    off = {"temperature": torch.ones(6), "top_p": torch.ones(6), "min_p": torch.zeros(6)}
    drawn = torch.tensor([True] * 5 + [False])
    token, logprob = reference.sample(
        logits, **off, top_k=torch.zeros(6).long(), uniform=uniform, do_sample=drawn
    )
    assert token.tolist() == [0, 0, 1, 2, 3, 1]
    same(logprob, logits[0][token])
