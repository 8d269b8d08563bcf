"""One call for many prompts, on tiny models: what goes in, what comes out, in which order."""

import inspect
import logging
import threading
from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, GenerationConfig
from transformers import ContinuousBatchingConfig as TheirConfig
from transformers import ContinuousBatchingManager as TheirManager
from transformers.generation import ContinuousMixin

import tcb
from tcb import ContinuousBatchingManager as Manager
from tcb.model.twin import plain_model
from tcb.options.generation import read_options
from tcb.service.intake import hints_of
from tests.support.calling import NEW, SMALL, generate, tokens
from tests.support.families import REFUSED, SIZES
from tests.support.reference import alone, prompts_of

pytestmark = pytest.mark.usefixtures("nothing_kept")


# names


def test_public_names_are_there_and_no_others():
    for name in tcb.__all__:
        assert getattr(tcb, name) is not None and name in dir(tcb)
    with pytest.raises(AttributeError, match="no_such_name"):
        tcb.no_such_name  # noqa: B018
    assert tcb.__version__.count(".") == 2


ENTRY_POINTS = (
    "generate_batch",
    "init_continuous_batching",
    "continuous_batching_context_manager",
    "destroy_cached_continuous_batching_manager",
)
METHODS = (
    "__init__",
    "__iter__",
    "warmup",
    "start",
    "stop",
    "join",
    "destroy",
    "pause",
    "is_running",
    "add_request",
    "add_requests",
    "cancel_request",
    "get_result",
    "request_id_iter",
    "register_result_handler",
    "switch_to_cb_friendly_attn",
)


@pytest.mark.parametrize(
    ("ours", "theirs", "name"),
    [(tcb, ContinuousMixin, name) for name in ENTRY_POINTS]
    # transformers 5.17 has no `pause`
    + [(Manager, TheirManager, name) for name in METHODS if hasattr(TheirManager, name)],
)
def test_signatures_are_those_of_transformers(ours, theirs, name):
    ours, theirs = shape_of(getattr(ours, name)), shape_of(getattr(theirs, name))
    assert ours[: len(theirs)] == theirs
    assert len(ours) <= len(theirs) + (name == "switch_to_cb_friendly_attn")


def shape_of(function: Callable):
    """Names, kinds and defaults of the parameters after the first."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return [(p.name, p.kind, p.default) for p in parameters]


# generate_batch


def test_tokens_equal_generate_in_the_order_of_the_prompts(tiny, prompts, expected):
    outputs = generate(tiny, prompts)
    assert list(outputs) == ["req_0", "req_1", "req_2", "req_3"]
    assert tokens(outputs) == expected
    assert [output.prompt_ids for output in outputs.values()] == prompts
    assert all(output.is_finished() and output.error is None for output in outputs.values())
    assert all(
        output.created_time <= output.lifespan[0] <= output.lifespan[1]
        for output in outputs.values()
    )


@pytest.mark.parametrize(
    "kind",
    [
        lambda rows: [torch.tensor(row) for row in rows],
        lambda rows: [np.array(row) for row in rows],
        lambda rows: [tuple(row) for row in rows],
        lambda rows: iter(rows),
        torch.tensor,
        np.array,
    ],
    ids=["tensors", "arrays", "tuples", "an iterator", "one tensor", "one array"],
)
def test_prompts_of_many_kinds(tiny, kind):
    rows = prompts_of((6, 6, 6))
    outputs = generate(tiny, kind(rows))
    assert tokens(outputs) == [alone(tiny, row, NEW) for row in rows]
    assert all(type(output.prompt_ids[0]) is int for output in outputs.values())


@pytest.mark.parametrize("inputs", [{"ids": [[1]]}, "text", None, 5])
def test_what_holds_no_prompts_is_a_type_error(tiny, inputs):
    with pytest.raises(TypeError, match=f"inputs is a {type(inputs).__name__}"):
        generate(tiny, inputs)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("org/model", "model is a str; accepted: a model, as `from_pretrained` returns it"),
        (None, "model is a NoneType; accepted: a model"),
        (BertModel(BertConfig(**SIZES)), "model is a BertModel, which cannot generate"),
    ],
    ids=["a path", "nothing", "no language model"],
)
def test_what_is_no_language_model_is_a_type_error(model, words):
    with pytest.raises(TypeError, match=words):
        generate(model, [[1, 2]])


@pytest.mark.parametrize("nothing", [[], (), torch.empty(0, 3, dtype=torch.int64)])
def test_no_prompts_no_outputs(tiny, nothing):
    assert generate(tiny, nothing) == {}


def test_bad_prompts_stand_in_their_place(tiny, prompts, expected, caplog):
    bad = [[], ["a"], [10**6], [-1], None, 5, [3] * 5000]
    mixed = [bad[0], prompts[0], *bad[1:4], prompts[1], *bad[4:], prompts[2]]
    outputs = list(generate(tiny, mixed).values())
    assert [output.request_id for output in outputs] == [f"req_{i}" for i in range(len(mixed))]
    for prompt, output in zip(mixed, outputs, strict=True):
        if prompt in prompts:
            assert output.generated_tokens == expected[prompts.index(prompt)]
        else:
            assert output.status is tcb.RequestStatus.FAILED and output.error
            assert output.generated_tokens == []


def test_several_return_sequences(tiny, prompts):
    options = {"do_sample": True, "num_return_sequences": 3}
    config = SMALL | {"seed": 7}
    outputs = generate(tiny, prompts[:3], continuous_batching_config=config, **options)
    assert list(outputs)[:3] == ["req_0__child#0", "req_0__child#1", "req_0"]
    assert len(outputs) == 9 and len({tuple(t) for t in tokens(outputs)}) > 3
    again = generate(tiny, prompts[:3], continuous_batching_config=config, **options)
    assert tokens(outputs) == tokens(again)


def test_log_probabilities_and_timestamps(tiny, prompts):
    config = SMALL | {"return_logprobs": True}
    outputs = generate(tiny, prompts, continuous_batching_config=config, record_timestamps=True)
    for output in outputs.values():
        assert len(output.logprobs) == len(output.timestamps) == NEW
        assert output.timestamps == sorted(output.timestamps)
    plain = next(iter(generate(tiny, prompts[:1]).values()))
    assert plain.logprobs == [] and plain.timestamps is None


def test_generation_options_come_in_three_ways(tiny, prompts, expected):
    by_config = generate(tiny, prompts, generation_config=GenerationConfig(max_new_tokens=3))
    assert tokens(by_config) == expected
    three = [each[:3] for each in expected]
    config = GenerationConfig(max_new_tokens=3)
    assert tokens(tcb.generate_batch(tiny, prompts, config, SMALL)) == three
    kept, tiny.generation_config = tiny.generation_config, deepcopy(tiny.generation_config)
    tiny.generation_config.max_new_tokens = 3
    assert tokens(tcb.generate_batch(tiny, prompts, None, SMALL)) == three
    tiny.generation_config = kept
    eos = expected[0][2]
    stopped = generate(tiny, prompts[:1], eos_token_id=eos)["req_0"]
    assert stopped.generated_tokens == expected[0][: expected[0].index(eos) + 1]


def test_what_cannot_be_served_is_refused_by_name_before_anything_starts(tiny, prompts):
    before = threading.active_count()
    for options, error, words in [
        ({"no_such_option": 1}, TypeError, "no_such_option"),
        ({"to_dict": 1}, TypeError, "to_dict"),
        ({"generation_config": {"max_new_tokens": 3}}, TypeError, "generation_config is a dict"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens"),
        ({"num_beams": 3}, ValueError, "num_beams is 3"),
        ({"stop_strings": ["x"]}, ValueError, "stop_strings"),
        ({"continuous_batching_config": {"page_size": 2}}, ValueError, "page_size is 2"),
        ({"continuous_batching_config": {"no_such_setting": 2}}, TypeError, "no_such_setting"),
        ({"continuous_batching_config": {"safety_margin": 1.5}}, ValueError, "safety_margin"),
        ({"continuous_batching_config": {"max_memory_percent": 1e-9}}, ValueError, "max_memory"),
        ({"continuous_batching_config": 5}, TypeError, "continuous_batching_config"),
    ]:
        with pytest.raises(error, match=words):
            generate(tiny, prompts, **options)
        assert threading.active_count() == before


@pytest.mark.parametrize("family", ["bloom", "mamba"])
def test_models_that_cannot_be_served_are_refused_by_name(family):
    model = REFUSED[family]()
    with pytest.raises(ValueError, match=type(model).__name__):
        tcb.generate_batch(model, [[1, 2]], max_new_tokens=2)


def test_the_caller_gets_everything_back_as_it_was(tiny, prompts, expected):
    tiny.train()
    generation = GenerationConfig(max_new_tokens=NEW)
    config = tcb.ContinuousBatchingConfig(**SMALL)
    before = deepcopy(generation).to_dict(), deepcopy(config), deepcopy(tiny.config.to_dict())
    attention, state = tiny.config._attn_implementation, torch.get_rng_state()
    outputs = tcb.generate_batch(tiny, prompts, generation, config, do_sample=False)
    assert tokens(outputs) == expected
    assert tiny.training and all(module.training for module in tiny.modules())
    assert (generation.to_dict(), config, tiny.config.to_dict()) == before
    assert tiny.config._attn_implementation == attention
    assert torch.equal(torch.get_rng_state(), state)
    tiny.eval()


@pytest.mark.parametrize(
    "mode",
    [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", dtype=torch.bfloat16)],
    ids=["inference_mode", "no_grad", "autocast"],
)
def test_under_any_mode_of_the_caller(tiny, prompts, expected, mode):
    with mode():
        assert tokens(generate(tiny, prompts, persistent_manager=True)) == expected
    engine = tiny._cached_continuous_batching_manager._loop.engine
    assert engine.layers.dtype == torch.float32
    assert tokens(generate(tiny, prompts, persistent_manager=True)) == expected
    with mode():
        assert tokens(generate(tiny, prompts, persistent_manager=True)) == expected


@pytest.mark.parametrize("kind", [dict, tcb.ContinuousBatchingConfig, TheirConfig])
def test_configurations_of_both_packages(tiny, prompts, expected, kind):
    values = {"num_blocks": 64, "max_batch_tokens": 32, "use_cuda_graph": False}
    config = kind(block_size=8, **values)
    assert tokens(generate(tiny, prompts, continuous_batching_config=config)) == expected


def test_a_configuration_inside_the_generation_config(tiny, prompts, expected):
    generation = GenerationConfig(max_new_tokens=NEW)
    generation.continuous_batching_config = TheirConfig(block_size=8, max_batch_tokens=40)
    manager = tcb.init_continuous_batching(tiny, generation)
    assert manager.continuous_batching_config.max_batch_tokens == 40
    manager.destroy()


def test_a_progress_bar_counts_requests(tiny, prompts, capsys, monkeypatch):
    generate(tiny, prompts, progress_bar=True)
    assert "4/4" in capsys.readouterr().err
    monkeypatch.setattr(logging.getLogger("ContinuousBatchingLogger"), "level", logging.DEBUG)
    generate(tiny, prompts, progress_bar=True)
    assert "4/4" not in capsys.readouterr().err


def test_wrapped_models(tiny, prompts, expected):
    class Wrapper(torch.nn.Module):
        """Answers like PEFT's tiny: attributes of what it wraps, and that tiny itself."""

        def __init__(self, inner, config):
            super().__init__()
            self.inner, self.peft_config, self.active_peft_config = inner, {}, config

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

        def get_base_model(self):
            return self.inner

    adapter = Wrapper(tiny, SimpleNamespace(is_prompt_learning=False))
    assert tokens(generate(adapter, prompts)) == expected
    assert plain_model(adapter) is tiny
    assert plain_model(torch.nn.DataParallel(torch.compile(adapter))) is tiny
    with pytest.raises(ValueError, match="SimpleNamespace"):
        generate(Wrapper(tiny, SimpleNamespace(is_prompt_learning=True)), prompts)
    assert tokens(generate(torch.compile(tiny), prompts)) == expected
    with pytest.raises(AttributeError, match="Linear"):
        generate(torch.nn.Linear(1, 1), prompts)


def test_hints(tiny):
    config = GenerationConfig(max_new_tokens=9, num_return_sequences=2, do_sample=True)
    hints = hints_of([[1], [1, 2, 3], None], read_options(tiny, config), for_more=False)
    assert hints == tcb.WorkloadHints(3, 9, 6)
    plain = read_options(tiny, GenerationConfig())
    assert hints_of([[1]], plain, for_more=True) == tcb.WorkloadHints(1, 0, 0)


def test_a_call_of_its_own_runs_in_the_callers_thread(tiny, prompts, expected, monkeypatch):
    from tcb.engine import Engine

    seen = set()
    step = Engine.step

    def watched(engine):
        seen.add(threading.current_thread())
        return step(engine)

    monkeypatch.setattr(Engine, "step", watched)
    assert tokens(generate(tiny, prompts)) == expected
    assert seen == {threading.current_thread()}


def test_an_interrupt_reaches_the_caller_and_the_next_call_works(
    tiny, prompts, expected, monkeypatch
):
    from tcb.engine import Engine

    def interrupted(engine):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(tiny, prompts, persistent_manager=True)
    assert tokens(generate(tiny, prompts, persistent_manager=True)) == expected
