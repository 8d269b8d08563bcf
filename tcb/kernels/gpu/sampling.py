"""Choose one token a row: temperature, top-k, top-p, min-p and a draw keyed by (seed, position).

This file checks the tensors and launches: `sampling_kernel` on accelerators, `torch_sampling` on
CPUs. It does not know requests, the seeds of whole runs, or logits processors.
"""

import torch
import triton

from tcb.kernels.checks import expect, expect_rank
from tcb.kernels.cpu import sampling as torch_sampling
from tcb.kernels.dispatch import use_triton
from tcb.kernels.gpu.sampling_kernel import sample_kernel

# elements that a program of 8 warps reads at a time; 4096 spill registers on sm_90 (bf16,
# vocabulary 151,936)
_MAX_BLOCK = 2048


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
    """One token a row [rows] int64 and its log-probability [rows] fp32 (None unless wanted).

    logits                     [rows, vocab] floating, vocab <= 2^19, last axis dense; unchanged
    temperature, top_p, min_p  [rows] fp32: > 0; 1 and more is off; 0 is off
    top_k, seed, position      [rows] int64: 0 is off; all 64 bits of the others key the draw
    do_sample                  [rows] bool

    A row without do_sample takes the lowest id of its highest logit. A row's result depends on its
    own logits and parameters alone. Of scores that tie at a threshold top-k keeps all, as
    transformers does, and top-p the lowest ids. The log-probability is that of the distribution
    drawn from. A row that holds NaN, or has do_sample and no finite maximum, gives -1 and NaN.
    ValueError names a tensor that does not fit; values are not read.
    """
    expect_rank("logits", logits, 2, "[rows, vocab]")
    rows, vocab = logits.shape
    device = logits.device
    expect("logits", logits, (rows, vocab), device=device)
    if not logits.is_floating_point():
        raise ValueError(f"logits: expected a floating dtype, got {logits.dtype}")
    if not 1 <= vocab <= torch_sampling.MAX_VOCAB:
        wanted = f"1..{torch_sampling.MAX_VOCAB}"
        raise ValueError(f"logits: expected a vocabulary of {wanted}, got {vocab}")
    parameters = {
        torch.float32: {"temperature": temperature, "top_p": top_p, "min_p": min_p},
        torch.int64: {"top_k": top_k, "seed": seed, "position": position},
        torch.bool: {"do_sample": do_sample},
    }
    for dtype, tensors in parameters.items():
        for name, tensor in tensors.items():
            expect(name, tensor, (rows,), device=device, dtype=dtype)
    if not use_triton(logits):
        return torch_sampling.sample(
            logits,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            position=position,
            do_sample=do_sample,
            want_logprob=want_logprob,
        )
    token = torch.empty(rows, dtype=torch.int64, device=device)
    logprob = torch.empty(rows, dtype=torch.float32, device=device)
    if rows:
        sample_kernel[(rows,)](
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            position,
            do_sample,
            token,
            logprob,
            logits.stride(0),
            VOCAB=vocab,
            BLOCK=min(triton.next_power_of_2(vocab), _MAX_BLOCK),
            WANT_LOGPROB=want_logprob,
            num_warps=8,
            # a fused multiply-add would round otherwise than torch operations do
            enable_fp_fusion=False,
        )
    return token, logprob if want_logprob else None
