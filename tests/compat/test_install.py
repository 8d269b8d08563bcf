"""Code written for transformers runs on this package: installed for all models, or for one."""

import asyncio
from copy import deepcopy
from inspect import signature
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    ContinuousBatchingConfig,
    ContinuousBatchingManager,
    GenerationConfig,
    LlamaForCausalLM,
)
from transformers.generation import ContinuousMixin, GenerationMixin

import tcb
from tests.support.families import FAMILIES
from tests.support.reference import alone, prompts_of

NEW = 5
METHODS = (
    "generate_batch",
    "init_continuous_batching",
    "continuous_batching_context_manager",
    "destroy_cached_continuous_batching_manager",
)


@pytest.fixture(scope="module")
def model():
    return FAMILIES["llama"]()


@pytest.fixture
def installed():
    tcb.install()
    yield
    tcb.uninstall()


def config(**settings):
    """Small pages under the name that every release of transformers knows."""
    return ContinuousBatchingConfig(block_size=8, num_blocks=64, max_batch_tokens=32, **settings)


def is_ours(manager):
    return isinstance(manager, tcb.ContinuousBatchingManager)


# installing


def test_install_and_uninstall(model):
    before = {name: getattr(ContinuousMixin, name) for name in METHODS}
    generate = GenerationMixin.generate
    prompts = prompts_of((5, 20))
    try:
        tcb.install()
        patched = LlamaForCausalLM.generate_batch
        tcb.install()
        assert LlamaForCausalLM.generate_batch is patched
        outputs = model.generate_batch(
            prompts,
            generation_config=GenerationConfig(max_new_tokens=NEW),
            continuous_batching_config=config(),
        )
        assert all(type(output) is tcb.GenerationOutput for output in outputs.values())
        assert [output.generated_tokens for output in outputs.values()] == [
            alone(model, prompt, NEW) for prompt in prompts
        ]
        assert is_ours(FAMILIES["qwen3"]().init_continuous_batching())
    finally:
        tcb.uninstall()
    tcb.uninstall()
    assert {name: getattr(ContinuousMixin, name) for name in METHODS} == before
    assert GenerationMixin.generate is generate


def test_what_is_installed_looks_like_what_was_there(installed):
    assert GenerationMixin.generate.__doc__ and LlamaForCausalLM.can_generate()
    for name in METHODS:
        assert getattr(ContinuousMixin, name).__name__ == name


def test_the_way_of_training_code(model, installed):
    """One call a step, under inference mode, in train mode, weights written in between."""
    prompts = prompts_of((9, 9, 9)) * 2
    trained = deepcopy(model).train()
    for _ in range(2):
        with torch.inference_mode():
            outputs = trained.generate_batch(
                prompts,
                generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False),
                continuous_batching_config=ContinuousBatchingConfig(
                    **{"max_memory_percent": 0.5, "use_cuda_graph": False, "max_cached_graphs": 4}
                ),
                progress_bar=False,
            )
        assert trained.training
        trained.eval()
        assert [output.generated_tokens for output in outputs.values()] == [
            alone(trained, prompt, NEW) for prompt in prompts
        ]
        trained.train()
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.data.mul_(0.9)


def test_the_way_of_evaluation_code(model, installed):
    """Poll a manager made by hand."""
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False),
        continuous_batching_config=config(),
    )
    manager.start()
    prompts = {f"sample-{i}": prompt for i, prompt in enumerate(prompts_of((5, 23, 40)))}
    for name, prompt in prompts.items():
        manager.add_request(prompt, request_id=name, max_new_tokens=NEW, streaming=False)
    got = {}
    while len(got) < len(prompts) and manager.is_running():
        result = manager.get_result(timeout=0.1)
        if result is not None and result.is_finished() and result.error is None:
            got[result.request_id] = result.generated_tokens
    manager.stop(block=True)
    assert got == {name: alone(model, prompt, NEW) for name, prompt in prompts.items()}


def test_iterating_until_all_came(model, installed):
    prompts = prompts_of((5, 23, 40))
    with model.continuous_batching_context_manager(
        generation_config=GenerationConfig(max_new_tokens=NEW), block=True, timeout=5
    ) as manager:
        manager.add_requests(prompts, streaming=True)
        ended = 0
        for result in manager:
            ended += result.is_finished()
            if ended == len(prompts):
                break
    assert ended == len(prompts)


# paged generate


@pytest.mark.parametrize("as_input", [True, False])
def test_paged_generate_has_the_shape_of_transformers(model, installed, as_input):
    rows = torch.tensor(prompts_of((7, 7)))
    options = {"max_new_tokens": NEW, "do_sample": False}
    expected = model.generate(rows, **options)
    given = {"inputs": rows} if as_input else {"input_ids": rows}
    paged = model.generate(**given, **options, cache_implementation="paged")
    assert paged.shape == (1, 2, 7 + NEW) and torch.equal(paged[0], expected)
    one = model.generate(rows[0], **options, cache_implementation="paged")
    assert torch.equal(one[0], expected[:1])


def test_paged_generate_with_padding_ragged_ends_and_options(model, installed):
    prompts = prompts_of((3, 8))
    rows = torch.tensor([[0] * 5 + prompts[0], prompts[1]])
    mask = torch.tensor([[0] * 5 + [1] * 3, [1] * 8])
    eos = alone(model, prompts[0], 9)[2]
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": eos}
    expected = model.generate(rows, attention_mask=mask, **options)
    for given in ({"attention_mask": mask}, {}):
        paged = model.generate(rows, **given, **options, cache_implementation="paged")
        assert torch.equal(paged[0], expected)


def test_paged_generate_with_several_return_sequences(model, installed):
    rows = torch.tensor(prompts_of((7, 7)))
    paged = model.generate(
        rows,
        GenerationConfig(max_new_tokens=NEW, num_return_sequences=3, do_sample=True),
        cache_implementation="paged",
    )
    assert paged.shape == (1, 6, 7 + NEW)
    assert torch.equal(paged[0, :, :7], rows.repeat_interleave(3, 0))


def test_paged_generate_refuses_by_name(model, installed):
    rows = torch.tensor(prompts_of((7,)))
    with pytest.raises(NotImplementedError, match="streamer"):
        model.generate(rows, streamer=print, cache_implementation="paged")
    with pytest.raises(NotImplementedError, match="assistant_model"):
        model.generate(rows, assistant_model=model, cache_implementation="paged")
    with pytest.raises(ValueError, match="num_beams is 2"):
        model.generate(rows, num_beams=2, cache_implementation="paged")
    with pytest.raises(TypeError, match="no_such_option"):
        model.generate(rows, no_such_option=2, cache_implementation="paged")
    with pytest.raises(ValueError, match="inputs"):
        model.generate(cache_implementation="paged")
    with pytest.raises(RuntimeError, match="req_0"):
        model.generate(rows + 10**6, max_new_tokens=2, cache_implementation="paged")


def test_ordinary_generate_is_left_alone(model, installed):
    rows = torch.tensor(prompts_of((7, 7)))
    patched = model.generate(rows, max_new_tokens=NEW, do_sample=False)
    tcb.uninstall()
    assert torch.equal(model.generate(rows, max_new_tokens=NEW, do_sample=False), patched)


# one model


class PassesOn(torch.nn.Module):
    """A wrapper in the manner of PEFT's: what it does not have itself the model inside answers."""

    def __init__(self, base_model):
        super().__init__()
        self.base_model = base_model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def forward(self, *args, **kwargs):
        return self.base_model(*args, **kwargs)


class Prompted(PassesOn):
    """Prompt learning, as PEFT shows it."""

    peft_config = ("default",)
    active_peft_config = SimpleNamespace(is_prompt_learning=True)

    def get_base_model(self):
        return self.base_model


class Negated(PassesOn):
    """A wrapper that changes what comes out."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = -output.logits
        return output


@pytest.mark.parametrize("wraps", [lambda model: model, PassesOn], ids=["once", "twice"])
def test_a_wrapper_that_passes_methods_on_is_what_generates(model, installed, wraps):
    for name in METHODS:
        assert signature(getattr(wraps(Prompted(model)), name))  # looking is free
    with pytest.raises(ValueError, match=r"peft_config is a SimpleNamespace; accepted: adapters"):
        Prompted(wraps(model)).generate_batch(prompts_of((5,)), max_new_tokens=NEW)
    (prompt,) = prompts_of((5,))
    wrapper = wraps(Negated(model))
    (output,) = wrapper.generate_batch([prompt], max_new_tokens=1).values()
    least = model(torch.tensor([prompt])).logits[0, -1].argmin()
    assert output.generated_tokens == [int(least)]
    assert getattr(wrapper, METHODS[0]).__self__ is wrapper


def test_attach_is_for_one_model():
    model, other = FAMILIES["llama"](), FAMILIES["llama"]()
    assert tcb.attach(model) is model
    manager = model.init_continuous_batching(GenerationConfig(max_new_tokens=2), config())
    assert is_ours(manager) and manager.generation_config.max_new_tokens == 2
    assert other.init_continuous_batching.__func__ is ContinuousMixin.init_continuous_batching
    rows = torch.tensor(prompts_of((7, 7)))
    paged = model.generate(rows, max_new_tokens=NEW, cache_implementation="paged")
    assert torch.equal(paged[0], other.generate(rows, max_new_tokens=NEW, do_sample=False))
    copy = deepcopy(model)
    assert copy.generate_batch.__self__ is copy
    manager.destroy()


def test_transformers_takes_a_kept_manager_for_its_own(model):
    prompts = prompts_of((5, 20))
    settings = {"continuous_batching_config": config(), "max_new_tokens": NEW}
    tcb.generate_batch(model, prompts, persistent_manager=True, **settings)
    kept = model._cached_continuous_batching_manager
    assert isinstance(kept, ContinuousBatchingManager) and is_ours(kept)
    assert ContinuousMixin.init_continuous_batching(model) is kept
    outputs = ContinuousMixin.generate_batch(model, prompts, persistent_manager=True)
    assert [output.generated_tokens for output in outputs.values()] == [
        alone(model, prompt, NEW) for prompt in prompts
    ]
    model.destroy_cached_continuous_batching_manager()
    assert not hasattr(model, "_cached_continuous_batching_manager")


# transformers serve


@pytest.fixture
def serving():
    """What `transformers serve --continuous-batching` talks to a model with."""
    module = pytest.importorskip("transformers.cli.serving.utils")
    model = tcb.attach(FAMILIES["llama"]())
    server = module.CBGenerateManager(cb_config=config())
    server.init_cb(model, GenerationConfig(max_new_tokens=NEW, do_sample=False))
    yield SimpleNamespace(module=module, model=model, server=server)
    server.stop()


def test_serve_answers(serving):
    model, server = serving.model, serving.server
    assert is_ours(server._cb) and server.is_alive() and server.scheduler is not None
    generation = GenerationConfig(max_new_tokens=NEW, eos_token_id=None)
    processor = SimpleNamespace(decode=lambda tokens, **_: " ".join(map(str, tokens)))
    prompts = prompts_of((5, 23, 40, 12))

    async def ask(i, prompt):
        return await server.generate_non_streaming(
            model, processor, {"input_ids": prompt}, generation, request_id=f"chat-{i}"
        )

    async def main():
        return await asyncio.gather(*(ask(i, prompt) for i, prompt in enumerate(prompts)))

    for prompt, (text, length, tokens) in zip(prompts, asyncio.run(main()), strict=True):
        assert tokens == alone(model, prompt, NEW) and length == len(prompt)
        assert text == " ".join(map(str, tokens))


def test_serve_streams_and_ends_even_if_the_request_was_faster(serving, monkeypatch):
    model, manager = serving.model, serving.server._cb
    (prompt,) = prompts_of((9,))

    async def main():
        got, ended = [], asyncio.get_running_loop().create_future()

        def note(output):
            got.append(output.generated_tokens)
            if output.is_finished():
                ended.set_result(output.error)

        manager.add_request(prompt, request_id="chat", streaming=True, max_new_tokens=NEW)
        while manager.output_router.is_live("chat"):
            await asyncio.sleep(0.001)
        manager.register_result_handler("chat", note)
        assert await asyncio.wait_for(ended, 10) is None
        return got

    tokens = alone(model, prompt, NEW)
    assert asyncio.run(main()) == [tokens[: i + 1] for i in range(NEW)]


def test_serve_learns_that_the_worker_died(serving, monkeypatch):
    model, server = serving.model, serving.server

    def broken():
        raise ArithmeticError("the device is gone")

    monkeypatch.setattr(server._cb._loop.engine, "step", broken)
    generation = GenerationConfig(max_new_tokens=NEW)

    async def ask():
        return await server.generate_non_streaming(
            model, None, {"input_ids": [1, 2]}, generation, request_id="chat"
        )

    for _ in range(2):
        with pytest.raises(serving.module.CBWorkerDeadError, match="the device is gone"):
            asyncio.run(ask())
    assert not server.is_alive()
