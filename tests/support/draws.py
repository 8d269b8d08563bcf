"""Whether tokens are those that the reference draws, whatever chose them."""

from torch import Tensor

from tcb.kernels import reference
from tcb.kernels.cpu.sampling import draw_uniform


def assert_is_drawn(
    logits: Tensor,
    made: dict[str, Tensor],
    token: Tensor,
    logprob: Tensor,
    logprob_bound: float = 4e-6,
) -> float:
    """Each row's token is the one whose share of [0, 1) holds the row's uniform number.

    made  the other tensors of `sample`; returns the largest error of a log-probability

    The bounds of a share are sums of probabilities. A weight is off by two roundings of a score of
    at most 25 below the highest, those of the exponential (four at most), and half an integer:
    together relatively (50 + 4) * 2^-24, and 2^-35 of the sum for each token. The sum that divides
    is off by as much again.
    """
    uniform = draw_uniform(made["seed"], made["position"])
    bound = 2 * (54 * 2**-24 + logits.shape[1] * 2**-35)
    names = "temperature", "top_k", "top_p", "min_p"
    largest = 0.0
    for row, logit in enumerate(logits.float()):
        chosen = int(token[row])
        if made["do_sample"][row]:
            temperature, *limits = (made[name][row] for name in names)
            # what ties in fp32 ties
            score = (logit / temperature).double()
            wanted = reference.filtered(score, 1.0, *(limit.item() for limit in limits))
            end = wanted.exp().cumsum(0)[chosen]
            begin = end - wanted[chosen].exp()
            assert begin - bound <= uniform[row] <= end + bound, f"row {row} chose {chosen}"
        else:
            wanted = logit.double().log_softmax(-1)
            lowest = int((logit == logit.max()).nonzero()[0])
            assert chosen == lowest, f"row {row} chose {chosen}, not {lowest}"
        # a token that the filters remove has minus infinity
        error = (logprob[row].double() - wanted[chosen]).abs().item()
        assert error <= logprob_bound, f"row {row}: log-probability off by {error:.3g}"
        largest = max(largest, error)
    return largest
