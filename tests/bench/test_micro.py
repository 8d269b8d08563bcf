"""Micro-benchmarks on the CPU; as ordinary tests each runs once; `bench.micro` times them.

Shapes are those of SmolLM2-135M: 9 query heads, 3 key-value heads of 64, 49,152 tokens.
"""

import pytest
import torch

import tcb
from bench import host
from bench.lib import attention, contenders
from bench.lib.attention import Workload
from bench.lib.systems import greedy
from bench.models import build
from tcb.kernels import sample

CPU = torch.device("cpu")
SHAPE = {"heads": 9, "kv_heads": 3, "dim": 64, "page_size": 32}
BATCHES = {
    "decode 32 x 512": Workload("", ((511, 1),) * 32, **SHAPE),
    "prefill 4 x 256": Workload("", ((0, 256),) * 4, **SHAPE),
    "mixed 31 x 512 + 256 at 256": Workload("", (*((511, 1),) * 31, (256, 256)), **SHAPE),
    "decode 32 x 512, window 128": Workload("", ((511, 1),) * 32, window=128, **SHAPE),
}


@pytest.mark.parametrize("sequences", [256, 1024])
@pytest.mark.parametrize("groups", list(host.KINDS))
def test_decode_step(groups, sequences, benchmark):
    rounds = 200
    state, limits = host.decoding_state(host.KINDS[groups], 16, sequences, 1000, rounds)
    stages = benchmark.pedantic(host.time_step, (state, limits, 1), rounds=rounds, warmup_rounds=17)
    assert len(stages) == len(host.STAGES)
    assert len(state.running) == sequences and not state.waiting


@pytest.mark.parametrize("name", BATCHES)
def test_attention(name, benchmark):
    tensors = attention.build(BATCHES[name], CPU, torch.float32)
    out = benchmark(contenders.tcb(BATCHES[name], tensors))
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "top-k, top-p"])
def test_sampling(do_sample, benchmark):
    rows, vocab = 32, 49_152
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))

    def full(value):
        return torch.full((rows,), value)

    options = {
        "temperature": full(0.8),
        "top_k": full(50 if do_sample else 0),
        "top_p": full(0.95 if do_sample else 1.0),
        "min_p": full(0.0),
        "seed": torch.arange(rows),
        "position": torch.arange(rows),
        "do_sample": full(do_sample),
    }
    token, _ = benchmark(sample, logits, **options)
    assert do_sample or torch.equal(token, logits.argmax(-1))


def test_one_prompt_one_token(benchmark):
    model = build("random-llama-tiny", torch.float32, CPU)
    outputs = benchmark(tcb.generate_batch, model, [[1, 2, 3]], generation_config=greedy(1))
    (output,) = outputs.values()
    assert len(output.generated_tokens) == 1
