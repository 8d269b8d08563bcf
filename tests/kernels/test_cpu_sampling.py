"""The parts of choosing a token on torch operations: weights, keys, thresholds, random words."""

import math

import pytest
import torch

from tcb.kernels.cpu import sampling as torch_sampling
from tcb.kernels.cpu.sampling import MAX_VOCAB, UNIT, order_key, philox, weigh


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
        total = weight.double().sum().item()
        kept = torch_sampling._nucleus(row, weight, math.ceil(top_p * total))
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
    uniform = torch_sampling.draw_uniform(keys, counters)
    assert uniform.unique().numel() == 129
    assert uniform.min() >= 0 and uniform.max() < 1


def test_uniform_numbers_are_the_first_53_of_62_random_bits():
    seed = torch.arange(500) * 0x9E3779B97F4A7C15
    first, second, _, _ = philox(seed, seed + 1)
    uniform = torch_sampling.draw_uniform(seed, seed + 1)
    for found, high, low in zip(uniform.tolist(), first.tolist(), second.tolist(), strict=True):
        assert found == ((high >> 1 << 31 | low >> 1) >> 9) / 2**53


def test_weights_are_the_exponential():
    score = -torch.logspace(-8, math.log10(25), 200_001)
    weight = weigh(score, torch.tensor(0.0)).double()
    exact = score.double().exp() * UNIT
    # half an integer; one unit in the last place of the exponential
    assert ((weight - exact).abs() <= 0.5 + exact * 2**-23).all()
    assert torch.equal(weight, weight.round())


def test_a_weight_does_not_depend_on_its_place():
    score = torch.randn(5003, generator=torch.Generator().manual_seed(4)) * 8
    weight = weigh(score, score.max())
    for start in range(40):
        for count in (1, 3, 7, 8, 15, 33, 4096):
            part = score[start : start + count]
            assert torch.equal(weigh(part, score.max()), weight[start : start + count])


def test_the_highest_score_weighs_the_unit_and_minus_infinity_nothing():
    score = torch.tensor([3.0, -math.inf, 3.0 - 25])
    assert weigh(score, score[0]).tolist() == [UNIT, 0, 0]


def test_sums_of_weights_are_exact():
    assert MAX_VOCAB * UNIT <= 2**53


def test_keys_order_as_scores_do():
    score = torch.tensor([-math.inf, -3e38, -1.0, -1e-45, 0.0, 1e-45, 1.0, 3e38, math.inf])
    key = order_key(score)
    assert torch.equal(key, key.sort().values)
    assert key.unique().numel() == key.numel()
    assert order_key(torch.tensor([-0.0])).item() == order_key(torch.tensor([0.0])).item()
