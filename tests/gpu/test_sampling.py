"""Sampling against its torch meaning: vocabularies of real models, dtypes of real logits."""

from typing import Any

import torch

from tcb.kernels import sample
from tcb.kernels.cpu import sampling as torch_sampling
from tests.gpu.checking import BRAIN, HALF, sized

SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.3},
    {"top_k": 50},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"temperature": 1.3, "top_k": 100, "top_p": 0.95, "min_p": 0.01},
    {"do_sample": False},
)
DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "do_sample": True}
LOGITS = [(vocab, dtype) for vocab in (32_000, 151_936, 262_144) for dtype in (BRAIN, HALF)]


@sized("vocab dtype", LOGITS, [(300, BRAIN)])
def test_tokens_are_those_of_the_torch_meaning(vocab, dtype, small, device, saw):
    each = 2 if small else 8
    rows = each * len(SETTINGS)
    generator = torch.Generator().manual_seed(vocab)
    logits = (4 * torch.randn(rows, vocab, generator=generator)).to(dtype)
    made = {
        name: torch.tensor([setting.get(name, default) for setting in SETTINGS] * each)
        for name, default in DEFAULTS.items()
    }
    made |= {
        name: torch.randint(2**40, (rows,), generator=generator) for name in ("seed", "position")
    }
    given = {name: tensor.to(device) for name, tensor in made.items()}
    token, logprob = (part.cpu() for part in sample(logits.to(device), **given))
    wanted, wanted_logprob = torch_sampling.sample(logits, **made)
    greedy_rows = ~made["do_sample"]
    assert torch.equal(token[greedy_rows], logits[greedy_rows].float().argmax(-1)), "greedy"
    # two logarithms that differ in the last bit part a draw about once in 10^5 rows, so two of
    # these rows never
    same = token == wanted
    assert int((~same).sum()) <= 1, f"{int((~same).sum())} of {rows} rows chose another token"
    # sums of up to 2^18 weights, each rounded to 2^-24 of the largest sum at most
    error = (logprob - wanted_logprob)[same].abs().max().item()
    assert error <= 1e-4, f"log-probability off by {error:.3g}"
    for row in (0, rows // 2, rows - 1):
        part = {name: tensor[row : row + 1] for name, tensor in given.items()}
        alone, its_logprob = sample(logits[row : row + 1].to(device), **part)
        assert alone.item() == token[row].item(), f"row {row} alone chose another token"
        assert its_logprob.item() == logprob[row].item(), f"row {row} alone: other bits"
    saw(rows=rows, equal=int(same.sum()), logprob_error=error)
