"""Choose one token a row on torch operations.

    score[i]  = logit[i] / temperature
    weight[i] = round(UNIT * exp(score[i] - max score)), an integer
    token     = first i with weight[0] + ... + weight[i] > uniform * (sum of all weights)

Weights of tokens that top-k, top-p or min-p removed are 0. Sums of integers below 2^53 are exact in
any order, so a row's token depends on its own logits and parameters only. torch's random state is
not read.
"""

import math

import torch

# the weight of the likeliest token: one less likely than 2^-35 of it has none, and those of 2^19
# tokens sum to at most the 2^53 that fp64 counts
UNIT = 2.0**34
MAX_VOCAB = 2**19
# elements of one block of the two-level argmax
_BLOCK = 256
# of so many keys a sort is faster than a histogram
_FEW = 2048
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
    drawn = do_sample.nonzero().flatten()
    uniforms = draw_uniform(seed[drawn], position[drawn]).tolist()
    columns = (setting[drawn].tolist() for setting in (temperature, top_k, top_p, min_p))
    for row, uniform, *limits in zip(drawn.tolist(), uniforms, *columns, strict=True):
        token[row], logprob[row] = _draw(logits[row], uniform, *limits)
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


def order_key(score: torch.Tensor) -> torch.Tensor:
    """int32 that compare as the fp32 scores do; both zeros are one."""
    bits = (score + 0.0).view(torch.int32)
    return (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)


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
    logits: torch.Tensor, uniform: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[int, float]:
    """One row's token and log-probability; (-1, nan) where there is no distribution to draw
    from."""
    score = logits.to(torch.float32) / temperature
    top = score.max()
    if not math.isfinite(top.item()):
        return -1, math.nan
    ids = None
    if 0 < top_k < score.numel():
        ids = _best(score, top_k)
        score = score[ids]
    weight = weigh(score, top)
    if top_p < 1:
        total = weight.sum(dtype=torch.float64).item()
        # all tokens this light weigh less than half of what top-p may remove, so the threshold lies
        # above them
        near = weight >= 0.5 * (1 - top_p) * total / weight.numel()
        if near.count_nonzero().item() * 8 < near.numel():
            places = near.nonzero().flatten()
            ids = places if ids is None else ids[places]
            score, weight = score[places], weight[places]
        weight = weight * _nucleus(score, weight, max(math.ceil(top_p * total), 1))
    if min_p > 0:
        weight = weight * (weight >= min_p * UNIT)
    mass = weight.cumsum(0, dtype=torch.float64)
    total = mass[-1].item()
    place = int(torch.searchsorted(mass, float(math.floor(uniform * total)), right=True))
    token = place if ids is None else int(ids[place])
    return token, (score[place] - top).item() - _log_mass(total)


def _best(score: torch.Tensor, top_k: int) -> torch.Tensor:
    """Ids, ascending, of the scores that are no lower than the top_k-th highest; top_k < vocab."""
    best = torch.topk(score, top_k + 1)
    if best.values[-1] < best.values[-2]:
        return best.indices[:-1].sort().values
    return (score >= best.values[-2]).nonzero().flatten()


def _nucleus(score: torch.Tensor, weight: torch.Tensor, budget: int) -> torch.Tensor:
    """Which tokens are in the smallest set of best tokens that weighs at least `budget` (bool).

    Of tokens with equal scores the lowest ids are taken, as a stable descending order would.
    """
    key = order_key(score)
    threshold, above, ties = _crossing(key, weight.double(), budget)
    kept = key > threshold
    tie_weight = int(weight[ties[0]].item())
    kept[ties[: -((above - budget) // tie_weight)]] = True
    return kept


def _crossing(
    key: torch.Tensor, weight: torch.Tensor, budget: int
) -> tuple[int, int, torch.Tensor]:
    """The highest key that, with all keys above it, weighs at least `budget`; the weight above;
    where that key is.

    While many are left: a histogram of the weights over the next digit of the keys finds the digit
    in which the budget is reached. Few are sorted.
    """
    above, places = 0.0, None
    for shift, digits in ((20, 4096), (8, 4096), (0, 256)):
        if key.numel() <= _FEW:
            break
        # the first digit is signed, and half of the digits are below zero
        digit = (key >> shift) + digits // 2 if shift == 20 else (key >> shift) & (digits - 1)
        reached = torch.bincount(digit, weights=weight, minlength=digits).flip(0).cumsum(0)
        place = int(torch.searchsorted(reached, budget - above))
        above += reached[place - 1].item() if place else 0.0
        inside = (digit == digits - 1 - place).nonzero().flatten()
        key, weight = key[inside], weight[inside]
        places = inside if places is None else places[inside]
    key, order = key.sort(descending=True, stable=True)
    reached = weight[order].cumsum(0)
    threshold = int(key[torch.searchsorted(reached, budget - above)])
    tied = (key == threshold).nonzero().flatten()
    first = int(tied[0])
    above += reached[first - 1].item() if first else 0.0
    return threshold, int(above), order[tied] if places is None else places[order[tied]]


def _log_mass(total: float) -> float:
    """Natural logarithm of a sum of weights, in units of the highest weight."""
    return math.log(total / UNIT)
