"""Sampling against its torch meaning, and whole tiny models against `generate`, on the device.

A check raises where the device is wrong and returns what it saw.
"""

from collections.abc import Iterator
from typing import Any

import torch

import tcb
from bench.accelerator import machine
from bench.accelerator.checks import BRAIN, HALF, Check
from bench.references import greedy
from tcb.kernels import sample
from tcb.kernels.cpu import sampling as torch_sampling
from tests.support.families import FAMILIES
from tests.support.reference import alone, prompts_of

_SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.3},
    {"top_k": 50},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"temperature": 1.3, "top_k": 100, "top_p": 0.95, "min_p": 0.01},
    {"do_sample": False},
)
_DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "do_sample": True}
# full layers; full and sliding ones; the same with soft caps
_KINDS = ("llama", "gemma3", "gemma2")


def sampling_checks(device: torch.device, small: bool) -> Iterator[tuple[str, Check]]:
    """Vocabularies of real models in the dtypes of real logits."""
    vocabularies = (300,) if small else (32_000, 151_936, 262_144)
    for vocab in vocabularies:
        for dtype in (BRAIN,) if small else (BRAIN, HALF):
            kind = str(dtype).removeprefix("torch.")
            yield f"sample, {vocab}, {kind}", _sampling(vocab, dtype, device, 2 if small else 8)


def _sampling(vocab: int, dtype: torch.dtype, device: torch.device, each: int) -> Check:
    def check() -> dict[str, Any]:
        rows = each * len(_SETTINGS)
        generator = torch.Generator().manual_seed(vocab)
        logits = (4 * torch.randn(rows, vocab, generator=generator)).to(dtype)
        made = {
            name: torch.tensor([s.get(name, default) for s in _SETTINGS] * each)
            for name, default in _DEFAULTS.items()
        }
        made |= {
            name: torch.randint(2**40, (rows,), generator=generator)
            for name in ("seed", "position")
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
        return {"rows": rows, "equal": int(same.sum()), "logprob_error": error}

    return check


def engine_checks(device: torch.device, small: bool) -> Iterator[tuple[str, Check]]:
    """Greedy tokens in fp32 equal `generate` alone, graphs asked for or not, at both depths."""
    for kind in _KINDS[1:2] if small else _KINDS:
        for graphs in (False,) if small else (False, True):
            name = f"engine, {kind}, graphs {'asked for' if graphs else 'off'}"
            yield name, _engine(kind, graphs, device, small)


def _engine(kind: str, graphs: bool, device: torch.device, small: bool) -> Check:
    def check() -> dict[str, Any]:
        model = FAMILIES[kind]().to(device)
        lengths, new_tokens = ((9, 1), 3) if small else ((70, 1, 33, 16, 17, 120), 24)
        prompts = prompts_of(list(lengths), seed=5)
        wanted = [alone(model, prompt, new_tokens) for prompt in prompts]
        for asynchronous in (False,) if small else (False, True):
            config = tcb.ContinuousBatchingConfig(
                page_size=16,
                num_blocks=64,
                max_batch_tokens=64,
                use_async_batching=asynchronous,
                use_cuda_graph=graphs,
            )
            outputs = tcb.generate_batch(
                model, prompts, greedy(new_tokens), continuous_batching_config=config
            )
            machine.synchronize(device)
            for number, output in enumerate(outputs.values()):
                assert not output.error, output.error
                got = list(output.generated_tokens)
                assert got == wanted[number], f"prompt {number}: {got} is not {wanted[number]}"
        return {"prompts": len(prompts), "new_tokens": new_tokens}

    return check
