"""The kernel of `sample`: one program a row.

    score  = logit / temperature
    weight = round(2^34 * exp(score - highest score)), an integer
    top-k  keeps the scores that are no lower than the k-th highest
    top-p  keeps the smallest set of best tokens whose weights reach top_p of their sum
    min-p  keeps the weights that are at least min_p of the highest
    token  = first id at which the sum of kept weights exceeds uniform * (sum of all kept weights)

A threshold is searched over the bits of the scores: every reading of the row quarters the interval
it may lie in, and nothing is sorted. Integers make sums exact, so neither the block size nor the
order of a reduction shows in the result, and `torch_sampling` gives the same tokens bit for bit.
It does not check anything and knows no devices.
"""

import triton
import triton.language as tl

from tcb.kernels.cpu import sampling as torch_sampling

# the weight of the likeliest token; what WEIGHT_BITS adds to the bits of an fp32 by its exponent
UNIT = tl.constexpr(2.0**torch_sampling.WEIGHT_BITS)
UNIT_EXPONENT = tl.constexpr(torch_sampling.WEIGHT_BITS << 23)
LOG2_E = tl.constexpr(torch_sampling.LOG2_E)
ROUND_MAGIC = tl.constexpr(torch_sampling.ROUND_MAGIC)
LEAST_EXPONENT = tl.constexpr(torch_sampling.LEAST_EXPONENT)
C1, C2, C3, C4, C5 = map(tl.constexpr, torch_sampling.EXP2_COEFFICIENTS)
# order key of minus infinity
LOWEST_KEY = tl.constexpr(-0x7F800001)
FRACTION_ONE = tl.constexpr(2.0**62)
LOW_31 = tl.constexpr(0x7FFFFFFF)


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
            budget = share(total, top_p)
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
            uniform = uniform_bits(tl.load(seed_ptr + row), tl.load(position_ptr + row))
            target, _ = scaled(total, uniform)
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
    for start in range(0, VOCAB, BLOCK):
        ids, score = load_scores(row_ptr, temperature, start, VOCAB, BLOCK)
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
        for start in range(0, VOCAB, BLOCK):
            _, score = load_scores(row_ptr, temperature, start, VOCAB, BLOCK)
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
    for start in range(0, VOCAB, BLOCK):
        ids, score = load_scores(row_ptr, temperature, start, VOCAB, BLOCK)
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
    for start in range(0, VOCAB, BLOCK):
        ids, score = load_scores(row_ptr, temperature, start, VOCAB, BLOCK)
        mass = tl.sum(kept_weight(ids, score, top, threshold, tie_end, least), 0)
        inside = (before <= target) & (target < before + mass)
        found_start = tl.where(inside, start, found_start)
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
    for start in range(0, VOCAB, BLOCK):
        ids, score = load_scores(row_ptr, temperature, start, VOCAB, BLOCK)
        tie = (order_key(score) == threshold).to(tl.int32)
        last = (tie > 0) & (seen + tl.cumsum(tie, 0) == quota)
        end = tl.minimum(end, tl.min(tl.where(last, ids, VOCAB), 0))
        seen += tl.sum(tie, 0)
    return end


@triton.jit
def load_scores(row_ptr, temperature, start, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Ids [BLOCK] and scores [BLOCK] from `start` on; beyond the vocabulary -inf, which has no
    weight."""
    ids = start + tl.arange(0, BLOCK)
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
    """round(2^WEIGHT_BITS * exp(score - top)) as int64: `torch_sampling.weigh`, operation by
    operation."""
    exponent = tl.maximum((score - top) * LOG2_E, LEAST_EXPONENT)
    whole = exponent + ROUND_MAGIC
    fraction = exponent - (whole - ROUND_MAGIC)
    power = fraction * C5
    power = (power + C4) * fraction
    power = (power + C3) * fraction
    power = (power + C2) * fraction
    power = (power + C1) * fraction
    power = power + 1.0
    shift = (whole.to(tl.int32, bitcast=True) << 23) + UNIT_EXPONENT
    power = (power.to(tl.int32, bitcast=True) + shift).to(tl.float32, bitcast=True)
    return tl.floor(power + 0.5).to(tl.int64)


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
def share(total, top_p):
    """The smallest integer >= top_p * total, and at least 1."""
    floor, exact = scaled(total, (tl.maximum(top_p, 0.0) * FRACTION_ONE).to(tl.int64))
    return tl.maximum(tl.where(exact, floor, floor + 1), 1)


@triton.jit
def scaled(total, fraction):
    """floor(total * fraction / 2^62) and whether that is exact; total <= 2^53, fraction < 2^62,
    both >= 0."""
    low = (total & LOW_31) * (fraction & LOW_31)
    middle = (total >> 31) * (fraction & LOW_31) + (total & LOW_31) * (fraction >> 31) + (low >> 31)
    high = (total >> 31) * (fraction >> 31) + (middle >> 31)
    return high, ((low | middle) & LOW_31) == 0


@triton.jit
def uniform_bits(seed, position):
    """A uniform integer in [0, 2^62) keyed by (seed, position): `torch_sampling.uniform_bits`."""
    low = position.to(tl.uint32)
    high = (position >> 32).to(tl.uint32)
    first, second, _, _ = tl.philox(seed, low, high, low * 0, low * 0)
    return ((first >> 1).to(tl.int64) << 31) | (second >> 1).to(tl.int64)
