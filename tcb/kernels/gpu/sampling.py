"""The launch of `sample`: one program a row of logits.

It does not know requests, the seeds of whole runs, or logits processors.
"""

import torch
import triton
from torch import Tensor

from tcb.kernels.contract import Sampling
from tcb.kernels.gpu.launch import Launch, start
from tcb.kernels.gpu.sampling_kernel import sample_kernel

# elements that a program of 8 warps reads at a time; 4096 spill registers on sm_90 (bf16,
# vocabulary 151,936)
_MAX_BLOCK = 2048


def sample(problem: Sampling, want_logprob: bool) -> tuple[Tensor, Tensor | None]:
    """`sample` of a problem that was checked."""
    logits, (rows, vocab) = problem.logits, problem.logits.shape
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprob = torch.empty(rows, dtype=torch.float32, device=logits.device)
    constants = {
        "VOCAB": vocab,
        "BLOCK": min(triton.next_power_of_2(vocab), _MAX_BLOCK),
        "WANT_LOGPROB": want_logprob,
        "num_warps": 8,
        # a fused multiply-add would round otherwise than torch operations do
        "enable_fp_fusion": False,
    }
    if rows:
        arguments = *problem, token, logprob, logits.stride(0)
        start([Launch(sample_kernel, rows, arguments, constants)], logits)
    return token, logprob if want_logprob else None
