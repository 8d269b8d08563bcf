"""Whole tiny models on the device: greedy tokens in fp32 equal `generate` alone."""

import itertools

import tcb
from bench.lib import machine
from bench.lib.systems import greedy
from tests.gpu.checking import sized
from tests.support.families import FAMILIES
from tests.support.reference import alone, prompts_of

# full layers; full and sliding ones; the same with soft caps
KINDS = ("llama", "gemma3", "gemma2")


@sized(
    "kind graphs asynchronous",
    itertools.product(KINDS, (False, True), (False, True)),
    [("gemma3", False, False)],
)
def test_tokens_are_those_of_generate(kind, graphs, asynchronous, small, device):
    model = FAMILIES[kind]().to(device)
    lengths, new_tokens = ((9, 1), 3) if small else ((70, 1, 33, 16, 17, 120), 24)
    prompts = prompts_of(list(lengths), seed=5)
    wanted = [alone(model, prompt, new_tokens) for prompt in prompts]
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
