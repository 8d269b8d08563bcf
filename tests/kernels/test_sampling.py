"""Choosing tokens: as transformers' warpers and the reference do, on Triton and torch, each row for
itself.
"""

import math

import pytest
import torch
import triton
import triton.language as tl
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tcb.kernels import sample
from tcb.kernels.cpu import sampling as torch_sampling
from tcb.kernels.cpu.sampling import MAX_VOCAB
from tcb.kernels.gpu.sampling import draw_uniform
from tests.support.draws import assert_is_drawn

SETTINGS = {
    "plain": {},
    "cold": {"temperature": 0.2},
    "hot": {"temperature": 7.0},
    "top_k": {"top_k": 6},
    "top_k 1": {"top_k": 1},
    "top_k beyond": {"top_k": 10**6},
    "top_p": {"top_p": 0.8},
    "top_p low": {"top_p": 0.05},
    "top_p 0": {"top_p": 0.0},
    "min_p": {"min_p": 0.1},
    "min_p 1": {"min_p": 1.0},
    "all": {"temperature": 1.6, "top_k": 20, "top_p": 0.9, "min_p": 0.03},
}


def parameters(rows, device="cpu", **values):
    """The tensors of `rows` rows that sample; seed and position are drawn unless given."""
    random = torch.Generator().manual_seed(11)
    seed = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=random)
    position = torch.randint(0, 2**40, (rows,), generator=random)
    made = {
        "temperature": torch.full((rows,), values.get("temperature", 1.0)),
        "top_k": torch.full((rows,), values.get("top_k", 0)),
        "top_p": torch.full((rows,), values.get("top_p", 1.0)),
        "min_p": torch.full((rows,), values.get("min_p", 0.0)),
        "seed": values.get("seed", seed),
        "position": values.get("position", position),
        "do_sample": torch.full((rows,), values.get("do_sample", True)),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


def mixed_parameters(rows):
    """Rows of every kind, one of `SETTINGS` after the other, each seventh greedy."""
    made = parameters(rows)
    for row in range(rows):
        for name, value in list(SETTINGS.values())[row % len(SETTINGS)].items():
            made[name][row] = value
    made["do_sample"] = torch.arange(rows) % 7 != 3
    return made


def on(device, made):
    return {name: tensor.to(device) for name, tensor in made.items()}


def random_logits(rows, vocab, scale=3.0, seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=random) * scale


def warped(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Scores after the warpers that `generate` would use, in its order."""
    warpers = LogitsProcessorList()
    if temperature != 1:
        warpers.append(TemperatureLogitsWarper(temperature))
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    return warpers(None, logits)


# the distribution


@pytest.mark.parametrize("setting", SETTINGS)
def test_support_and_probabilities_are_those_of_transformers(setting):
    values = SETTINGS[setting]
    vocab, draws = 24, 3000
    row = random_logits(1, vocab, scale=1.2, seed=5)
    wanted = warped(row, **values).log_softmax(-1)[0]
    token, logprob = torch_sampling.sample(row.expand(draws, vocab), **parameters(draws, **values))
    # an id of probability 1/200 is missed by all draws once in 3 million
    likely = (wanted > math.log(1 / 200)).nonzero().flatten()
    assert (
        set(likely.tolist())
        <= set(token.tolist())
        <= set(wanted.isfinite().nonzero()[:, 0].tolist())
    )
    # both are within a few fp32 roundings of values of at most 10
    torch.testing.assert_close(logprob, wanted[token], rtol=0, atol=4e-6)


@pytest.mark.parametrize("setting", ["plain", "top_p", "all"])
def test_draws_have_the_probabilities_they_should(setting):
    values = SETTINGS[setting]
    vocab, draws = 24, 4000
    row = random_logits(1, vocab, scale=1.2, seed=6)
    probability = warped(row, **values).softmax(-1)[0].double()
    kept = probability > 0
    # one seed with every position, and every seed at one position
    for given in ({"seed": torch.full((draws,), 7)}, {"position": torch.full((draws,), 3)}):
        counting = torch.arange(draws)
        token, _ = torch_sampling.sample(
            row.expand(draws, vocab),
            **parameters(draws, **values, **{"seed": counting, "position": counting, **given}),
            want_logprob=False,
        )
        observed = torch.bincount(token, minlength=vocab)[kept]
        expected = draws * probability[kept]
        statistic = ((observed - expected) ** 2 / expected).sum().item()
        freedom = int(kept.sum()) - 1
        # mean and standard deviation of chi-square; 5 deviations
        assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("setting", SETTINGS)
def test_large_vocabulary_keeps_what_transformers_keeps(setting):
    values = SETTINGS[setting]
    row = random_logits(1, 50_021, seed=8)
    wanted = warped(row, **values).log_softmax(-1)[0]
    token, logprob = torch_sampling.sample(row.expand(24, -1), **parameters(24, **values))
    # the sum of 50,021 weights is off by 2^-35 each at most: 1.5e-6; the rest is rounding, here and
    # there
    torch.testing.assert_close(logprob, wanted[token], rtol=0, atol=6e-6)


def test_ties_at_the_top_k_threshold_are_all_kept(device):
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, 3.0]]).expand(24, -1).to(device)
    token, _ = sample(logits, **parameters(24, device, top_k=2))
    assert set(token.tolist()) == {1, 2, 4, 5}


@pytest.mark.parametrize(
    "top_p, kept", [(0.5, {0, 1}), (0.51, {0, 1, 2}), (0.2, {0}), (0.0, {0}), (0.76, {0, 1, 2, 3})]
)
def test_of_ties_at_the_top_p_threshold_the_lowest_ids_are_kept(device, top_p, kept):
    logits = torch.zeros(24, 4, device=device)
    token, logprob = sample(logits, **parameters(24, device, top_p=top_p))
    assert set(token.tolist()) == kept
    assert torch.allclose(logprob, torch.full_like(logprob, -math.log(len(kept))), atol=1e-6)


def test_zeros_of_both_signs_tie(device):
    logits = torch.tensor([[0.0, -0.0, -1.0]]).expand(12, -1).to(device)
    token, _ = sample(logits, **parameters(12, device, top_k=1))
    assert set(token.tolist()) == {0, 1}


@pytest.mark.parametrize("temperature", [1e-30, 1e-4, 1e4, 1e30])
def test_extreme_temperatures(device, temperature):
    vocab, rows = 8, 40
    row = torch.tensor([[0.5, -1.0, 2.0, 1.5, 0.0, 1.0, -3.0, 2.5]]).to(device)
    token, logprob = sample(
        row.expand(rows, vocab), **parameters(rows, device, temperature=temperature)
    )
    if temperature < 1:
        assert set(token.tolist()) == {7} and not logprob.any()
    else:
        assert set(token.tolist()) == set(range(8))
        assert torch.allclose(logprob, torch.full_like(logprob, -math.log(8)), atol=1e-3)


# what the reference says, in fp64


def choose_by_torch(logits, **made):
    return torch_sampling.sample(logits.cpu(), **on("cpu", made))


@pytest.fixture(params=[sample, choose_by_torch], ids=["triton", "torch"])
def choose(request):
    return request.param


def check(choose, device, logits, made):
    token, logprob = choose(logits.to(device), **on(device, made))
    assert_is_drawn(logits, made, token.cpu(), logprob.cpu())
    return token.cpu()


@pytest.mark.parametrize("vocab", [1, 2, 37, 700])
def test_tokens_are_those_of_the_reference(choose, device, vocab):
    check(choose, device, random_logits(24, vocab), mixed_parameters(24))


def test_tokens_are_those_of_the_reference_among_ties(choose, device):
    check(choose, device, (random_logits(24, 300) * 2).round() / 2, mixed_parameters(24))


def test_tokens_are_those_of_the_reference_across_blocks(choose, device):
    rows, vocab = 3, 9001
    made = parameters(rows, top_p=0.95)
    made["top_k"][1] = 5000
    made["do_sample"][2] = False
    logits = random_logits(rows, vocab, scale=0.1)
    logits[2, 8500] = logits[2, 4500] = 9
    assert check(choose, device, logits, made)[2] == 4500


def test_triton_draws_with_the_same_numbers_as_torch(device):
    # the interpreter is chosen where a kernel is made
    @triton.jit
    def uniform_kernel(seed_ptr, position_ptr, out_ptr):
        row = tl.program_id(0)
        number = draw_uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row))
        tl.store(out_ptr + row, number)

    made = parameters(64)
    seed, position = made["seed"].to(device), made["position"].to(device)
    out = torch.empty(64, dtype=torch.float64, device=device)
    uniform_kernel[(64,)](seed, position, out)
    wanted = torch_sampling.draw_uniform(made["seed"], made["position"])
    assert torch.equal(out.cpu(), wanted)


# a row alone and in company


@pytest.mark.parametrize("vocab", [700, 5003])
def test_torch_rows_do_not_depend_on_their_batch(vocab):
    rows = 33
    logits, made = random_logits(rows, vocab), mixed_parameters(rows)
    token, logprob = torch_sampling.sample(logits, **made)
    random = torch.Generator().manual_seed(2)
    for size in range(1, rows + 1, 1 if vocab < 1000 else 4):
        chosen = torch.randperm(rows, generator=random)[:size]
        part = {name: tensor[chosen] for name, tensor in made.items()}
        part_token, part_logprob = torch_sampling.sample(logits[chosen], **part)
        assert torch.equal(part_token, token[chosen])
        assert torch.equal(part_logprob, logprob[chosen])


def test_rows_do_not_depend_on_their_batch(device):
    rows = 13
    logits, made = random_logits(rows, 130).to(device), on(device, mixed_parameters(rows))
    token, logprob = sample(logits, **made)
    for chosen in ([4], [12, 0], list(range(rows))[::-1]):
        part = {name: tensor[chosen] for name, tensor in made.items()}
        part_token, part_logprob = sample(logits[chosen], **part)
        assert torch.equal(part_token, token[chosen])
        assert torch.equal(part_logprob, logprob[chosen])


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_do_not_depend_on_the_number_of_threads(threads):
    logits, made = random_logits(2, 70_001), parameters(2, top_p=0.9)
    wanted = torch_sampling.sample(logits, **made)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        token, logprob = torch_sampling.sample(logits, **made)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(token, wanted[0])
    assert torch.equal(logprob, wanted[1])


# greedy rows and broken rows


@pytest.mark.parametrize("vocab", [1, 5, 256, 257, 1000])
def test_greedy_is_the_lowest_id_of_the_highest_logit(device, vocab):
    logits = random_logits(6, vocab).round().to(device)
    token, logprob = sample(logits, **parameters(6, device, do_sample=False))
    for row, chosen in zip(logits, token.tolist(), strict=True):
        assert chosen == (row == row.max()).nonzero()[0].item()
    wanted = logits.log_softmax(-1).gather(1, token[:, None])[:, 0]
    torch.testing.assert_close(logprob, wanted, rtol=0, atol=4e-6)


def test_greedy_rows_read_none_of_the_other_parameters(device):
    logits = random_logits(1, 50).to(device)
    odd = parameters(1, device, do_sample=False, temperature=0.0, top_k=1, top_p=0.0, min_p=1.0)
    plain = parameters(1, device, do_sample=False)
    for one, other in zip(sample(logits, **odd), sample(logits, **plain), strict=True):
        assert torch.equal(one, other)


def test_rows_with_nan_are_marked_and_hurt_no_neighbour(device):
    logits = random_logits(6, 300).to(device)
    made = on(device, mixed_parameters(6))
    wanted, wanted_logprob = sample(logits, **made)
    for row, place in ((0, 0), (3, 299), (5, 150)):
        logits[row, place] = math.nan
    token, logprob = sample(logits, **made)
    assert token.tolist() == [-1, *wanted[1:3].tolist(), -1, wanted[4].item(), -1]
    assert logprob.isnan().tolist() == [True, False, False, True, False, True]
    assert torch.equal(logprob[[1, 2, 4]], wanted_logprob[[1, 2, 4]])


@pytest.mark.parametrize("value, greedy", [(math.inf, 3), (-math.inf, 0)])
def test_rows_without_a_finite_maximum(device, value, greedy):
    logits = torch.full((2, 9), -math.inf, device=device)
    logits[:, 3] = value
    made = parameters(2, device)
    made["do_sample"][0] = False
    token, logprob = sample(logits, **made)
    assert token.tolist() == [greedy, -1]
    assert logprob.isnan().all()


def test_what_is_minus_infinity_is_never_drawn(device):
    logits = torch.full((12, 300), -math.inf, device=device)
    logits[:, [7, 200]] = 1.0
    for values in ({}, {"top_k": 5}, {"top_p": 0.9999}):
        token, logprob = sample(logits, **parameters(12, device, **values))
        assert set(token.tolist()) == {7, 200}
        assert torch.allclose(logprob, torch.full_like(logprob, -math.log(2)), atol=1e-6)


# what goes in


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_read_as_fp32(choose, device, dtype):
    logits = random_logits(8, 90).to(dtype)
    made = mixed_parameters(8)
    token = check(choose, device, logits, made)
    assert torch.equal(token, check(choose, device, logits.float(), made))


def test_rows_may_be_strided_and_are_not_written(device):
    wide = random_logits(4, 400).to(device)
    logits = wide[:, 30:200]
    before, state = wide.clone(), torch.get_rng_state()
    made = on(device, mixed_parameters(4))
    token, logprob = sample(logits, **made)
    dense_token, dense_logprob = sample(logits.contiguous(), **made)
    assert torch.equal(token, dense_token)
    assert torch.equal(logprob, dense_logprob)
    assert torch.equal(wide, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_results_are_int64_and_fp32_or_nothing(device):
    logits, made = random_logits(2, 20).to(device), parameters(2, device)
    token, logprob = sample(logits, **made)
    assert (token.dtype, logprob.dtype) == (torch.int64, torch.float32)
    alone, nothing = sample(logits, **made, want_logprob=False)
    assert torch.equal(alone, token)
    assert nothing is None


def test_no_rows(device):
    token, logprob = sample(torch.empty(0, 20, device=device), **parameters(0, device))
    assert token.shape == logprob.shape == (0,)


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("temperature", torch.ones(3)),
        ("temperature", torch.ones(2, dtype=torch.float64)),
        ("top_k", torch.ones(2, dtype=torch.int32)),
        ("top_p", torch.ones(2, 1)),
        ("seed", torch.ones(2)),
        ("do_sample", torch.ones(2, dtype=torch.uint8)),
        ("logits", torch.ones(20)),
        ("logits", torch.ones(2, 20, dtype=torch.int64)),
        ("logits", torch.ones(20, 2).T),
        ("logits", torch.ones(2, 0)),
        ("logits", torch.ones(1, 1).expand(2, MAX_VOCAB + 1)),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(device, name, wrong):
    made = {"logits": torch.ones(2, 20, device=device), **parameters(2, device)}
    made[name] = wrong.to(device)
    with pytest.raises(ValueError, match=f"^{name}: "):
        sample(**made)
