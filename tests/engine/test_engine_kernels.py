"""The engine with every kernel as Triton, in the interpreter: tokens equal `model.generate`."""

import pytest

from tcb.kernels.cpu import operations as torch_ops
from tcb.kernels.cpu import sampling as torch_sampling
from tcb.kernels.dispatch import is_interpreting
from tcb.kernels.gpu import paged_decode
from tcb.kernels.gpu.tuning import DeviceFacts
from tests.conftest import INTERPRETED
from tests.support.families import FAMILIES, WINDOW
from tests.support.reference import alone, new_engine, prompts_of, run, serve

NEW_TOKENS = 6
PAGE_SIZE = 8
# full, sliding, hybrid, soft-capped hybrid, hybrid with sinks, latent attention (values narrower
# than keys)
DAILY, MORE = ["llama", "gemma3", "deepseek_v3"], ["mistral", "gemma2", "gpt_oss"]
KINDS = [*DAILY, *(pytest.param(name, marks=pytest.mark.deep) for name in MORE)]


@pytest.fixture(autouse=True)
def only_triton(monkeypatch):
    """Triton's interpreter for all operations; torch operations must not be reached."""
    if not INTERPRETED:
        pytest.skip("runs in the interpreter only: an accelerator or TRITON_INTERPRET is set")
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    def unexpected(*_, **__):
        raise AssertionError("a torch operation ran in place of a Triton kernel")

    for name in torch_ops.__all__:
        monkeypatch.setattr(torch_ops, name, unexpected)
    monkeypatch.setattr(torch_sampling, "sample", unexpected)
    # the fewest programs a decode: these sequences are shorter than one part, and a program that
    # finds nothing to do takes the interpreter as long as another
    one = DeviceFacts("interpreter", 1)
    monkeypatch.setattr(paged_decode, "read_device", lambda *_: one)
    assert is_interpreting()


@pytest.mark.parametrize("family", KINDS)
def test_tokens_equal_generate(family, monkeypatch):
    if family != "llama":
        # sequences in one part each, which is a quarter of the programs
        monkeypatch.setattr(paged_decode, "choose_splits", lambda *_: 1)
    model = FAMILIES[family]()
    head = prompts_of([2 * PAGE_SIZE + 3], seed=1)[0]
    # a shared prefix of two pages, a chunked prompt beyond the window, a single token
    prompts = [head + tail for tail in prompts_of([WINDOW, 2], seed=2)] + prompts_of([1], seed=3)
    expected = [alone(model, prompt, NEW_TOKENS) for prompt in prompts]
    engine = new_engine(model, page_size=PAGE_SIZE, num_blocks=16, max_batch_tokens=24)
    assert serve(engine, prompts, NEW_TOKENS) == expected


def test_a_prefix_hit_and_offload_with_two_batches_in_flight(monkeypatch):
    monkeypatch.setattr(paged_decode, "choose_splits", lambda *_: 1)
    model = FAMILIES["gemma3"]()
    prompts = prompts_of([18, 18, 17], seed=4)
    expected = [alone(model, prompt, NEW_TOKENS) for prompt in prompts]
    engine = new_engine(
        model,
        page_size=4,
        num_blocks=7,
        max_batch_tokens=24,
        use_async_batching=True,
        cpu_offload_space=0.001,
    )
    assert serve(engine, prompts, NEW_TOKENS) == expected
    assert serve(engine, prompts[:1], NEW_TOKENS) == expected[:1]
    assert not run(engine)
