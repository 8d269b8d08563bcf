"""The parts of choosing a token on torch operations: weights, keys, thresholds, random words."""

import math

import pytest
import torch

from tcb.kernels.cpu import sampling as torch_sampling
from tcb.kernels.cpu.sampling import MAX_VOCAB, UNIT, philox, weigh


@pytest.mark.parametrize("scale", [1e-7, 1.0, 40.0])
def test_the_threshold_of_top_p_is_found_to_the_last_bit(scale):
    vocab = 20_000
    random = torch.Generator().manual_seed(9)
    logits = torch.randn(6, vocab, generator=random) * 3
    # scores that differ in their lowest bits only, and scores over the whole range of exponents
    logits = 1 + logits * scale if scale < 1 else logits * scale
    top_p = torch.tensor((0.01, 0.3, 0.5, 0.9, 0.99, 0.9999))
    top = logits.amax(1)
    weight = weigh(logits, top[:, None])
    budget = (top_p.double() * weight.sum(1, dtype=torch.float64)).ceil()
    threshold, reached = torch_sampling._nucleus(logits.clone(), top, budget)
    for row in range(len(logits)):
        order = logits[row].argsort(descending=True, stable=True)
        sums = weight[row, order].double().cumsum(0)
        last = int((sums < budget[row]).sum())
        assert threshold[row] == logits[row, order[last]]
        assert reached[row] == sums[last]


@pytest.mark.parametrize("few", [1, 7, 64, 10**6])
def test_the_nucleus_does_not_depend_on_how_many_are_selected_first(few, monkeypatch):
    random = torch.Generator().manual_seed(1)
    # many ties, at the threshold too
    logits = (torch.randn(9, 500, generator=random) * 4).round() / 2
    top = logits.amax(1)
    total = weigh(logits, top[:, None]).sum(1, dtype=torch.float64)
    budget = (total * torch.linspace(0.05, 1, 9)).ceil()
    wanted = torch_sampling._nucleus(logits.clone(), top, budget)
    monkeypatch.setattr(torch_sampling, "_FEW", few)
    for found, expected in zip(
        torch_sampling._nucleus(logits.clone(), top, budget), wanted, strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("elements", [1, 3000])
def test_rows_do_not_depend_on_how_many_are_drawn_from_at_once(elements, monkeypatch):
    random = torch.Generator().manual_seed(2)
    logits = (torch.randn(12, 700, generator=random) * 6).round() / 2
    made = {
        "temperature": torch.linspace(0.5, 2, 12),
        "top_k": torch.arange(12) % 3 * 20,
        "top_p": torch.linspace(0.3, 1.2, 12).clamp(max=1),
        "min_p": (torch.arange(12) % 4 == 1) * 0.1,
        "seed": torch.arange(12),
        "position": torch.arange(12) * 7,
        "do_sample": torch.arange(12) % 5 != 4,
    }
    wanted = torch_sampling.sample(logits, **made)
    monkeypatch.setattr(torch_sampling, "_AT_ONCE", elements)
    for found, expected in zip(torch_sampling.sample(logits, **made), wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_zeros_of_both_signs_tie_at_the_threshold_of_top_p():
    logits = torch.tensor([[-0.0, 0.0, -9.0, 0.0, -0.0]]).expand(40, -1)
    made = {"temperature": torch.ones(40)}
    made |= {"top_k": torch.zeros(40, dtype=torch.int64), "min_p": torch.zeros(40)}
    made |= {"top_p": torch.full((40,), 0.6), "do_sample": torch.ones(40, dtype=torch.bool)}
    made |= {"seed": torch.arange(40), "position": torch.arange(40)}
    token, _ = torch_sampling.sample(logits, **made)
    assert set(token.tolist()) == {0, 1, 3}


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
