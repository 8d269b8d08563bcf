"""Sampling against the reference: vocabularies of real models, dtypes of real logits."""

from typing import Any

import torch

from tcb.kernels import sample
from tests.gpu.checking import BRAIN, HALF, sized
from tests.support.draws import assert_is_drawn

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
def test_tokens_are_those_of_the_reference(vocab, dtype, small, device, saw):
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
    # sums of up to 2^18 weights, each rounded to 2^-24 of the largest sum at most
    error = assert_is_drawn(logits, made, token, logprob, logprob_bound=1e-4)
    for row in (0, rows // 2, rows - 1):
        part = {name: tensor[row : row + 1] for name, tensor in given.items()}
        alone, its_logprob = sample(logits[row : row + 1].to(device), **part)
        assert alone.item() == token[row].item(), f"row {row} alone chose another token"
        assert its_logprob.item() == logprob[row].item(), f"row {row} alone: other bits"
    saw(rows=rows, logprob_error=error)
