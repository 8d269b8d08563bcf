"""Choose one token a row on torch operations.

    score[i]  = logit[i] / temperature
    weight[i] = round(UNIT * exp(score[i] - max score)), an integer
    token     = first i with weight[0] + ... + weight[i] > uniform * (sum of all weights)

Weights of tokens that top-k, top-p or min-p removed are 0. Sums of integers below 2^53 are exact in
any order, so a row's token depends on its own logits and parameters only. torch's random state is
not read.
"""

import math

import numpy as np
import torch

# the weight of the likeliest token: one less likely than 2^-35 of it has none, and those of 2^19
# tokens sum to at most the 2^53 that fp64 counts
UNIT = 2.0**34
MAX_VOCAB = 2**19
# elements of one block of the two-level argmax and of the two-level sum
_BLOCK = 256
# so many scores are sorted at once; a selection that was too small grows by a factor
_FEW, _GROWTH = 4096, 4
# elements of the rows that are drawn from together: what is made of them stays in the cache
_AT_ONCE = 2**19
_LOW_32 = 0xFFFFFFFF


def sample(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    do_sample: torch.Tensor,
    want_logprob: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One token a row and its log-probability; the contract is that of `tcb.kernels.sample`."""
    if logits.dtype == torch.float64:
        logits = logits.to(torch.float32)
    logprob = logits.new_full(logits.shape[:1], math.nan, dtype=torch.float32)
    if not logits.shape[0]:
        return torch.empty(0, dtype=torch.int64), logprob if want_logprob else None
    token, best = _argmax(logits)
    token = torch.where(best.isnan(), -1, token)
    if want_logprob:
        for row in (~do_sample & best.isfinite()).nonzero().flatten().tolist():
            weight = weigh(logits[row].to(torch.float32), best[row].to(torch.float32))
            logprob[row] = -_log_mass(weight.sum(dtype=torch.float64).item())
    rows_at_once = max(1, _AT_ONCE // logits.shape[1])
    drawn = do_sample.nonzero().flatten()
    if len(drawn) < len(logits):
        logits = logits.index_select(0, drawn)
    for part, rows in zip(logits.split(rows_at_once), drawn.split(rows_at_once), strict=True):
        uniform = draw_uniform(seed[rows], position[rows])
        columns = (setting[rows] for setting in (temperature, top_k, top_p, min_p))
        token[rows], logprob[rows] = _draw(part, uniform, *columns)
    return token, logprob if want_logprob else None


def draw_uniform(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Multiples of 2^-53 in [0, 1), fp64, keyed by (seed, position), both int64 of any one shape.

    Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with the seed
    as key and the position as the low half of the counter; upper bits of the first two words.
    """
    first, second, _, _ = philox(seed, position)
    return (((first >> 1) << 22) | (second >> 10)).double() * 2.0**-53


def philox(seed: torch.Tensor, counter: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The four 32-bit words of Philox4x32-10 as int64 tensors: `triton.language.philox(seed, low,
    high, 0, 0)`."""
    word_0, word_1 = counter & _LOW_32, (counter >> 32) & _LOW_32
    word_2, word_3 = torch.zeros_like(counter), torch.zeros_like(counter)
    key_0, key_1 = seed & _LOW_32, (seed >> 32) & _LOW_32
    for _ in range(10):
        # products wrap at 2^64 and the shift copies the sign, but the 32 bits that are kept are
        # right
        product_0, product_2 = word_0 * 0xD2511F53, word_2 * 0xCD9E8D57
        word_0, word_1, word_2, word_3 = (
            ((product_2 >> 32) & _LOW_32) ^ word_1 ^ key_0,
            product_2 & _LOW_32,
            ((product_0 >> 32) & _LOW_32) ^ word_3 ^ key_1,
            product_0 & _LOW_32,
        )
        key_0, key_1 = (key_0 + 0x9E3779B9) & _LOW_32, (key_1 + 0xBB67AE85) & _LOW_32
    return word_0, word_1, word_2, word_3


def weigh(score: torch.Tensor, top: torch.Tensor | float) -> torch.Tensor:
    """round(UNIT * exp(score - top)), fp32 integers; score fp32, -inf included, top >= score."""
    return (score - top).exp_().mul_(UNIT).round_()


def _argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lowest id of the highest logit [rows] and that logit [rows]; NaN wins, as in torch.argmax.

    Block maxima first: the vector maximum is ten times as fast as torch's scalar argmax (fp32 [128,
    49152] on one core: 2 ms, 15 ms).
    """
    vocab = logits.shape[1]
    whole = vocab // _BLOCK * _BLOCK
    maxima = logits[:, :whole].unflatten(1, (-1, _BLOCK)).amax(2) if whole else logits[:, :0]
    if whole < vocab:
        maxima = torch.cat([maxima, logits[:, whole:].amax(1, keepdim=True)], dim=1)
    start = maxima.argmax(1) * _BLOCK
    ids = (start[:, None] + torch.arange(_BLOCK, device=logits.device)).clamp_(max=vocab - 1)
    block = logits.gather(1, ids)
    within = block.argmax(1, keepdim=True)
    return ids.gather(1, within)[:, 0], block.gather(1, within)[:, 0]


def _draw(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and log-probabilities of some rows; -1 and NaN where there is no distribution to draw
    from.
    """
    score = logits.to(torch.float32)
    if (temperature != 1).any():
        score = score / temperature[:, None]
    top = score.amax(1)
    sound = top.isfinite()
    if not sound.all():
        token = torch.full(top.shape, -1)
        logprob = torch.full_like(top, math.nan)
        if sound.any():
            columns = (uniform, temperature, top_k, top_p, min_p)
            drawn = _draw(logits[sound], *(column[sound] for column in columns))
            token[sound], logprob[sound] = drawn
        return token, logprob
    weight = weigh(score, top[:, None])
    few_best = ((top_k > 0) & (top_k < score.shape[1])).nonzero()[:, 0].tolist()
    if few_best:
        threshold = torch.full_like(top, -math.inf)
        for row in few_best:
            threshold[row] = _kth_highest(score[row], int(top_k[row]))
        _drop_below(weight, score, threshold)
    mass = _block_sums(weight)
    is_nucleus = (top_p < 1).nonzero()[:, 0]
    if len(is_nucleus):
        _keep_nucleus(is_nucleus, score, top, weight, mass, top_p)
        mass = _block_sums(weight)
    if (min_p > 0).any():
        _drop_below(weight, weight, min_p * UNIT)
        mass = _block_sums(weight)
    reached = mass.cumsum(1)
    total = reached[:, -1]
    token = _find(weight, reached, (uniform * total).floor_())
    chosen = (score.gather(1, token[:, None])[:, 0] - top).tolist()
    logprobs = [below - _log_mass(sum_) for below, sum_ in zip(chosen, total.tolist(), strict=True)]
    return token, torch.tensor(logprobs, dtype=torch.float32)


def _kth_highest(score: torch.Tensor, k: int) -> float:
    values = score.numpy()
    return np.partition(values, len(values) - k)[len(values) - k].item()


def _drop_below(weight: torch.Tensor, value: torch.Tensor, threshold: torch.Tensor) -> None:
    """weight = 0 where value < threshold[row]. Written as fp32, a comparison takes a quarter of the
    time.
    """
    weight *= torch.ge(value, threshold[:, None], out=torch.empty_like(value))


def _keep_nucleus(
    rows: torch.Tensor,
    score: torch.Tensor,
    top: torch.Tensor,
    weight: torch.Tensor,
    mass: torch.Tensor,
    top_p: torch.Tensor,
) -> None:
    """Clear the weights outside the smallest set of best tokens that weighs top_p of their sum.

    Of tokens with equal scores the lowest ids are taken, as a stable descending order would.
    """
    totals, shares = mass.sum(1)[rows].tolist(), top_p[rows].tolist()
    budget = [max(math.ceil(p * total), 1) for p, total in zip(shares, totals, strict=True)]
    threshold, reached = torch.full_like(top, -math.inf), torch.full_like(mass[:, 0], math.inf)
    wanted = torch.tensor(budget, dtype=torch.float64)
    threshold[rows], reached[rows] = _nucleus(score.index_select(0, rows), top[rows], wanted)
    _drop_below(weight, score, threshold)
    for row in (_block_sums(weight).sum(1) > reached).nonzero()[:, 0].tolist():
        ties = (score[row] == threshold[row]).nonzero()[:, 0]
        extra = weight[row].sum(dtype=torch.float64).item() - reached[row].item()
        weight[row, ties[-int(extra / weight[row, ties[0]].item()) :]] = 0


def _nucleus(
    values: torch.Tensor, top: torch.Tensor, budget: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest score of each row's smallest set of highest scores that weighs at least `budget`,
    and the weight of that set. Reorders `values` [rows, vocab], whose rows weigh that much.

    Selects ever more of the highest scores and sorts those among which the budget is reached.
    numpy's selection takes a hundredth of the time of a sort in torch.
    """
    threshold, reached = torch.empty_like(top), torch.empty_like(budget)
    rows, above = torch.arange(len(top)), torch.zeros_like(budget)
    end, count = values.shape[1], _FEW
    while end and len(rows):
        start = max(end - count, 0)
        if start:
            values.numpy()[:, :end].partition(start)
        part = values[:, start:end]
        upper = above + weigh(part, top[rows, None]).sum(1, dtype=torch.float64)
        inside = upper >= budget[rows]
        if inside.any():
            ordered = torch.from_numpy(np.sort(part[inside].numpy())).flip(1)
            found = rows[inside]
            sums = weigh(ordered, top[found, None]).cumsum(1, dtype=torch.float64)
            sums += above[inside, None]
            place = torch.searchsorted(sums, budget[found, None])
            threshold[found] = ordered.gather(1, place)[:, 0]
            reached[found] = sums.gather(1, place)[:, 0]
            values, rows, upper = values[~inside], rows[~inside], upper[~inside]
        above, end, count = upper, start, count * _GROWTH
    assert not len(rows), "a budget is higher than the weights of its row"
    return threshold, reached


def _block_sums(weight: torch.Tensor) -> torch.Tensor:
    """Sums of blocks of weights [rows, vocab], fp64 [rows, blocks]; the last may be shorter."""
    vocab = weight.shape[1]
    whole = vocab // _BLOCK * _BLOCK
    sums = weight[:, :whole].unflatten(1, (-1, _BLOCK)).sum(2, dtype=torch.float64)
    if whole == vocab:
        return sums
    last = weight[:, whole:].sum(1, keepdim=True, dtype=torch.float64)
    return torch.cat([sums, last], dim=1)


def _find(weight: torch.Tensor, reached: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """For each row the first id at which the sum of its weights exceeds `target`.

    reached  sums up to the end of each block of weights
    """
    block = torch.searchsorted(reached, target[:, None], right=True)
    before = reached.gather(1, (block - 1).clamp(min=0)).where(block > 0, 0.0)
    ids = block * _BLOCK + torch.arange(_BLOCK)
    inside = ids < weight.shape[1]
    own = weight.gather(1, ids.clamp(max=weight.shape[1] - 1)) * inside
    sums = own.cumsum(1, dtype=torch.float64) + before
    return (block * _BLOCK + torch.searchsorted(sums, target[:, None], right=True))[:, 0]


def _log_mass(total: float) -> float:
    """Natural logarithm of a sum of weights, in units of the highest weight."""
    return math.log(total / UNIT)
