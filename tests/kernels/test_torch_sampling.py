"""The parts of choosing a token on torch operations: weights, keys, thresholds, random words."""

import math

import pytest
import torch

from tcb.kernels.cpu import sampling as torch_sampling
from tcb.kernels.cpu.sampling import MAX_VOCAB, WEIGHT_BITS, order_key, philox, weigh


@pytest.mark.parametrize("scale", [1e-7, 1.0, 40.0])
def test_the_threshold_of_top_p_is_found_to_the_last_bit(scale):
    vocab = 20_000
    random = torch.Generator().manual_seed(9)
    logits = torch.randn(6, vocab, generator=random) * 3
    # scores that differ in their lowest bits only, and scores over the whole range of exponents
    logits = 1 + logits * scale if scale < 1 else logits * scale
    for row, top_p in zip(logits, (0.01, 0.3, 0.5, 0.9, 0.99, 0.9999), strict=True):
        top_p = torch.tensor(top_p).item()
        weight = weigh(row, row.max())
        total = int(weight.double().sum())
        kept = torch_sampling._nucleus(row, weight, torch_sampling._share(total, top_p))
        order = row.argsort(descending=True, stable=True)
        before = weight[order].double().cumsum(0) - weight[order]
        assert torch.equal(kept[order], before < top_p * total)


def test_philox_gives_the_published_numbers():
    zero = torch.zeros(1, dtype=torch.int64)
    words = [word.item() for word in philox(zero, zero)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_every_bit_of_seed_and_position_counts():
    bits = torch.ones(64, dtype=torch.int64) << torch.arange(64)
    keys = torch.cat([bits, torch.zeros(65, dtype=torch.int64)])
    counters = torch.cat([torch.zeros(65, dtype=torch.int64), bits])
    uniform = torch_sampling.uniform_bits(keys, counters)
    assert uniform.unique().numel() == 129
    assert uniform.min() >= 0 and uniform.max() < 2**62


def test_weights_are_the_exponential():
    score = -torch.logspace(-8, math.log10(25), 200_001)
    weight = weigh(score, torch.tensor(0.0)).double()
    exact = score.double().exp() * 2.0**WEIGHT_BITS
    # half an integer; 2^f and its roundings 1.9e-7; the exponent, below 37, is rounded twice and
    # scaled by ln 2
    bound = 0.5 + exact * (1.9e-7 + 1.5 * 2**-24 * score.double().abs())
    assert ((weight - exact).abs() <= bound).all()
    assert torch.equal(weight, weight.round())


def test_the_highest_score_weighs_the_unit_and_minus_infinity_nothing():
    score = torch.tensor([3.0, -math.inf, 3.0 - 25])
    assert weigh(score, score[0]).tolist() == [2.0**WEIGHT_BITS, 0, 0]


def test_sums_of_weights_are_exact():
    assert MAX_VOCAB * 2**WEIGHT_BITS <= 2**53


def test_keys_order_as_scores_do():
    score = torch.tensor([-math.inf, -3e38, -1.0, -1e-45, 0.0, 1e-45, 1.0, 3e38, math.inf])
    key = order_key(score)
    assert torch.equal(key, key.sort().values)
    assert key.unique().numel() == key.numel()
    assert order_key(torch.tensor([-0.0])).item() == order_key(torch.tensor([0.0])).item()
