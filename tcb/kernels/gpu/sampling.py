"""`sample` as a Triton kernel: one program a row.

    score  = logit / temperature
    weight = round(2^34 * exp(score - highest score)), an integer
    top-k  keeps the scores that are no lower than the k-th highest
    top-p  keeps the smallest set of best tokens whose weights reach top_p of their sum
    min-p  keeps the weights that are at least min_p of the highest
    token  = first id at which the sum of kept weights exceeds uniform * (sum of all kept weights)

A threshold is searched over the bits of the scores: every reading of the row quarters the interval
it may lie in, and nothing is sorted. Sums of integers are exact, so neither the block size nor the
order of a reduction shows in a result: a row's token depends on its own logits and parameters only.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tcb.kernels.contract import Sampling
from tcb.kernels.cpu.sampling import UNIT as _UNIT
from tcb.kernels.gpu.launch import Launch, power_of_2, start

# elements that a program of 8 warps reads at a time; 4096 spill registers on sm_90 (bf16,
# vocabulary 151,936)
_MAX_BLOCK = 2048
# the weight of the likeliest token
UNIT = tl.constexpr(_UNIT)
# order key of minus infinity
LOWEST_KEY = tl.constexpr(-0x7F800001)
LOW_31 = tl.constexpr(0x7FFFFFFF)


def sample(problem: Sampling, want_logprob: bool) -> tuple[Tensor, Tensor | None]:
    """`sample` of a problem that was checked."""
    logits, (rows, vocab) = problem.logits, problem.logits.shape
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprob = torch.empty(rows, dtype=torch.float32, device=logits.device)
    constants = {
        "VOCAB": vocab,
        "BLOCK": min(power_of_2(vocab), _MAX_BLOCK),
        "WANT_LOGPROB": want_logprob,
        "num_warps": 8,
        # with it the kernel takes four more registers on sm_90 (bf16, vocabulary 151,936)
        "enable_fp_fusion": False,
    }
    if rows:
        arguments = *problem, token, logprob, logits.stride(0)
        start([Launch(sample_kernel, rows, arguments, constants)], logits)
    return token, logprob if want_logprob else None


@triton.jit
def sample_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    position_ptr,
    do_sample_ptr,
    token_ptr,
    logprob_ptr,
    stride_logits_row,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    WANT_LOGPROB: tl.constexpr,
):
    """Program row: its token and log-probability."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits_row
    drawing = tl.load(do_sample_ptr + row) != 0
    temperature = tl.where(drawing, tl.load(temperature_ptr + row), 1.0)
    top, token, broken = find_top(row_ptr, temperature, VOCAB, BLOCK)
    chosen_score = top
    bounded = (tl.abs(top) < float("inf")) & (broken == 0)
    broken = broken | (drawing & (bounded == 0))
    threshold = tl.full((), LOWEST_KEY, tl.int64)
    tie_end = tl.full((), VOCAB, tl.int32)
    least = tl.full((), 0, tl.int64)
    drawing = drawing & bounded
    logprob = tl.full((), float("nan"), tl.float32)
    if drawing:
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        if (top_k > 0) & (top_k < VOCAB):
            count = tl.full((), VOCAB, tl.int64)
            threshold, above, reached = search(
                row_ptr, temperature, top, threshold, count, top_k, VOCAB, BLOCK, True
            )
        if top_p < 1:
            total = mass_of(row_ptr, temperature, top, threshold, tie_end, least, VOCAB, BLOCK)
            # the smallest integer that is at least this share, and at least 1
            budget = tl.maximum(tl.ceil(total.to(tl.float64) * top_p).to(tl.int64), 1)
            threshold, above, reached = search(
                row_ptr, temperature, top, threshold, total, budget, VOCAB, BLOCK, False
            )
            tie_weight = weigh(score_of(threshold), top)
            quota = (budget - above + tie_weight - 1) // tie_weight
            if quota * tie_weight < reached - above:
                tie_end = find_tie(row_ptr, temperature, threshold, quota, VOCAB, BLOCK)
        least = tl.ceil(tl.load(min_p_ptr + row) * UNIT).to(tl.int64)
    if drawing | (bounded & WANT_LOGPROB):
        total = mass_of(row_ptr, temperature, top, threshold, tie_end, least, VOCAB, BLOCK)
        if drawing:
            uniform = draw_uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row))
            target = (total.to(tl.float64) * uniform).to(tl.int64)
            token, chosen_score = pick(
                row_ptr, temperature, top, threshold, tie_end, least, target, VOCAB, BLOCK
            )
        logprob = chosen_score - top - tl.log(total.to(tl.float32) / UNIT)
    if WANT_LOGPROB:
        tl.store(logprob_ptr + row, logprob)
    tl.store(token_ptr + row, tl.where(broken, -1, token).to(tl.int64))


@triton.jit
def find_top(row_ptr, temperature, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Highest score, the lowest id that has it, and whether a score is NaN."""
    top = tl.full((), float("-inf"), tl.float32)
    token = tl.full((), 0, tl.int32)
    broken = tl.full((), 0, tl.int1)
    for first_id in range(0, VOCAB, BLOCK):
        ids, score = load_scores(row_ptr, temperature, first_id, VOCAB, BLOCK)
        broken = broken | (tl.max((score != score).to(tl.int32), 0) > 0)
        score = tl.where(score == score, score, float("-inf"))
        block_top = tl.max(score, 0)
        first = tl.min(tl.where(score == block_top, ids, VOCAB), 0)
        token = tl.where(block_top > top, first, token)
        top = tl.maximum(top, block_top)
    return top, token, broken


@triton.jit
def search(
    row_ptr,
    temperature,
    top,
    low,
    reached,
    budget,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
):
    """The highest key whose tokens, with all above them, weigh at least `budget` (each 1 where
    COUNT).

    low      a key of which that is known, with `reached` the weight from it on
    returns  the key, the weight above it, the weight from it on
    """
    high = order_key(top).to(tl.int64) + 1
    above = tl.full((), 0, tl.int64)
    if not COUNT:
        # nothing below has weight (exp(-25) < 2^-35), so that the weight from there on is the same
        low = tl.maximum(low, order_key(top - 25.0).to(tl.int64))
    while high - low > 1:
        step = (high - low + 3) // 4
        one = low + step
        two = tl.minimum(one + step, high)
        three = tl.minimum(two + step, high)
        from_one, from_two, from_three = above, above, above
        lowest, highest = high.to(tl.int32), low.to(tl.int32)
        for first_id in range(0, VOCAB, BLOCK):
            _, score = load_scores(row_ptr, temperature, first_id, VOCAB, BLOCK)
            key = order_key(score)
            inside = (key >= low.to(tl.int32)) & (key < high.to(tl.int32))
            block_lowest = tl.min(tl.where(inside, key, high.to(tl.int32)), 0)
            # as the interval narrows, most blocks hold nothing of it
            if block_lowest < high.to(tl.int32):
                weight = inside.to(tl.int64)
                if not COUNT:
                    weight = tl.where(inside, weigh(score, top), 0)
                from_one += tl.sum(tl.where(key >= one.to(tl.int32), weight, 0), 0)
                from_two += tl.sum(tl.where(key >= two.to(tl.int32), weight, 0), 0)
                from_three += tl.sum(tl.where(key >= three.to(tl.int32), weight, 0), 0)
                lowest = tl.minimum(lowest, block_lowest)
                highest = tl.maximum(highest, tl.max(tl.where(inside, key, low.to(tl.int32)), 0))
        # no key lies between low and lowest, none between highest and high
        bottom, end = lowest.to(tl.int64), highest.to(tl.int64) + 1
        if from_two >= budget:
            if from_three >= budget:
                low, reached = three, from_three
            else:
                low, reached, high, above = two, from_two, three, from_three
        else:
            if from_one >= budget:
                low, reached, high, above = one, from_one, two, from_two
            else:
                high, above = one, from_one
        low, high = tl.maximum(low, bottom), tl.minimum(high, end)
    return low, above, reached


@triton.jit
def mass_of(
    row_ptr,
    temperature,
    top,
    threshold,
    tie_end,
    least,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum of the kept weights."""
    total = tl.full((), 0, tl.int64)
    for first_id in range(0, VOCAB, BLOCK):
        ids, score = load_scores(row_ptr, temperature, first_id, VOCAB, BLOCK)
        total += tl.sum(kept_weight(ids, score, top, threshold, tie_end, least), 0)
    return total


@triton.jit
def pick(
    row_ptr,
    temperature,
    top,
    threshold,
    tie_end,
    least,
    target,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first token up to which the kept weights sum to more than `target`, and its score."""
    before = tl.full((), 0, tl.int64)
    found_before = tl.full((), 0, tl.int64)
    found_start = tl.full((), 0, tl.int32)
    for first_id in range(0, VOCAB, BLOCK):
        ids, score = load_scores(row_ptr, temperature, first_id, VOCAB, BLOCK)
        mass = tl.sum(kept_weight(ids, score, top, threshold, tie_end, least), 0)
        inside = (before <= target) & (target < before + mass)
        found_start = tl.where(inside, first_id, found_start)
        found_before = tl.where(inside, before, found_before)
        before += mass
    ids, score = load_scores(row_ptr, temperature, found_start, VOCAB, BLOCK)
    weight = kept_weight(ids, score, top, threshold, tie_end, least)
    over = found_before + tl.cumsum(weight, 0) > target
    token = tl.min(tl.where(over, ids, VOCAB), 0)
    return token, tl.sum(tl.where(ids == token, score, 0.0), 0)


@triton.jit
def find_tie(row_ptr, temperature, threshold, quota, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Id of the quota-th token whose key is the threshold."""
    seen = tl.full((), 0, tl.int32)
    end = tl.full((), VOCAB, tl.int32)
    for first_id in range(0, VOCAB, BLOCK):
        ids, score = load_scores(row_ptr, temperature, first_id, VOCAB, BLOCK)
        tie = (order_key(score) == threshold).to(tl.int32)
        last = (tie > 0) & (seen + tl.cumsum(tie, 0) == quota)
        end = tl.minimum(end, tl.min(tl.where(last, ids, VOCAB), 0))
        seen += tl.sum(tie, 0)
    return end


@triton.jit
def load_scores(row_ptr, temperature, first_id, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Ids [BLOCK] and scores [BLOCK] from `first_id` on; beyond the vocabulary -inf, which has no
    weight."""
    ids = first_id + tl.arange(0, BLOCK)
    logit = tl.load(row_ptr + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    return ids, tl.div_rn(logit, temperature)


@triton.jit
def kept_weight(ids, score, top, threshold, tie_end, least):
    """Weights [BLOCK] int64, 0 where a token was removed."""
    key = order_key(score)
    weight = weigh(score, top)
    threshold = threshold.to(tl.int32)
    kept = (key > threshold) | ((key == threshold) & (ids <= tie_end))
    return tl.where(kept & (weight >= least), weight, 0)


@triton.jit
def weigh(score, top):
    """round(UNIT * exp(score - top)) as int64."""
    return tl.floor(tl.exp(score - top) * UNIT + 0.5).to(tl.int64)


@triton.jit
def order_key(score):
    """int32 that compare as the scores do; both zeros are one."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & LOW_31)


@triton.jit
def score_of(key):
    """The score that has this order key (scalar int64)."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & LOW_31)).to(tl.float32, bitcast=True)


@triton.jit
def draw_uniform(seed, position):
    """A multiple of 2^-53 in [0, 1) keyed by (seed, position): `cpu.sampling.draw_uniform`."""
    low = position.to(tl.uint32)
    high = (position >> 32).to(tl.uint32)
    first, second, _, _ = tl.philox(seed, low, high, low * 0, low * 0)
    bits = ((first >> 1).to(tl.int64) << 22) | (second >> 10).to(tl.int64)
    return bits.to(tl.float64) * 2.0**-53
