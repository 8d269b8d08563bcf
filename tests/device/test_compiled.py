"""Compiled batches give the tokens of `generate`, by few programs whatever the workload."""

import logging

import pytest
import torch

from tcb.device import compiled
from tcb.model import linear
from tests.support.families import FAMILIES
from tests.support.reference import alone, new_engine, prompts_of, serve

LOGGER = "ContinuousBatchingLogger"
SETTINGS = {"page_size": 8, "num_blocks": 96, "max_batch_tokens": 32}
PROMPTS = prompts_of((5, 30, 12, 1), seed=8)
NEW = 6
# one token and more, one sample and more, mixed and decoding batches together
MOST_PROGRAMS = 4


class Counting:
    """A backend that runs what it was given as it is, and counts it."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph

    def __deepcopy__(self, memo):
        return self


def config(backend):
    return {
        name: {"backend": backend, "dynamic": True}
        for name in ("varlen_compile_config", "decode_compile_config")
    }


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


def deep(*values):
    """Cases that take a compiler's time, of `make deep`."""
    return [pytest.param(value, marks=pytest.mark.deep) for value in values]


@pytest.fixture(params=["llama", *deep("gemma3", "gpt_oss")])
def model(request, monkeypatch):
    # products of the package take part, small as the layers are
    monkeypatch.setattr(linear, "_LARGE", 1)
    return FAMILIES[request.param]()


def test_no_workload_makes_more_programs(model):
    backend = Counting()
    engine = new_engine(model, **SETTINGS, **config(backend))
    # a day's mix: alone and together, short and long, in chunks, with prefix hits
    for lengths in ((7,), (1, 1), (40, 3, 9), (5, 30, 12, 1, 64), (1,), (21,) * 7):
        prompts = prompts_of(lengths, seed=3)
        assert serve(engine, prompts, NEW) == [alone(model, prompt, NEW) for prompt in prompts]
    assert 1 <= len(backend.graphs) <= MOST_PROGRAMS
    names = [str(node.target) for node in backend.graphs[0].graph.nodes]
    assert names.count("tcb.attend.default") == len(engine.layers.layers)
    assert "tcb.product.default" in names


@pytest.mark.parametrize("level", deep(1, 2, 3))
def test_levels_give_the_tokens_of_generate(level, caplog):
    if not compiled._has_compiler():
        pytest.skip("Inductor finds no C++ compiler here")
    model = FAMILIES["llama"]()
    with caplog.at_level(logging.INFO, logger=LOGGER):
        engine = new_engine(model, **SETTINGS, default_compile_level=level)
        expected = [alone(model, prompt, NEW) for prompt in PROMPTS[:2]]
        assert serve(engine, PROMPTS[:2], NEW) == expected
    assert any(message.startswith("compiling the model") for message in caplog.messages)
    assert not any("run eagerly" in message for message in caplog.messages)


def test_new_weights_are_seen():
    model, backend = FAMILIES["llama"](), Counting()
    engine = new_engine(model, **SETTINGS, **config(backend))
    before = serve(engine, PROMPTS, NEW)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.data.mul_(-1)
    assert engine.refresh_weights()
    now = [alone(model, prompt, NEW) for prompt in PROMPTS]
    assert serve(engine, PROMPTS, NEW) == now != before


@pytest.mark.deep
def test_engines_share_no_programs():
    backends = Counting(), Counting()
    for backend in backends:
        engine = new_engine(FAMILIES["llama"](), **SETTINGS, **config(backend))
        serve(engine, PROMPTS, NEW)
    assert all(1 <= len(backend.graphs) <= MOST_PROGRAMS for backend in backends)


def broken(graph, inputs):
    raise RuntimeError("this backend is broken")


@pytest.mark.parametrize("case", ["no compiler", "broken backend", "unknown backend"])
def test_what_cannot_be_compiled_runs_eagerly_with_the_reason(case, monkeypatch, caplog):
    model = FAMILIES["llama"]()
    settings, reason = {"default_compile_level": 1}, "no C\\+\\+ compiler"
    if case == "no compiler":
        monkeypatch.setattr(compiled, "_has_compiler", lambda: False)
    elif case == "broken backend":
        settings, reason = config(broken), "this backend is broken"
    else:
        settings, reason = config("no such backend"), "no such backend"
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        engine = new_engine(model, **SETTINGS, **settings)
        expected = [alone(model, prompt, NEW) for prompt in PROMPTS]
        assert serve(engine, PROMPTS, NEW) == expected
    (message,) = caplog.messages
    assert message.startswith("all batches are not compiled and run eagerly: ")
    assert reason.replace("\\", "") in message


def test_an_error_of_a_batch_is_no_reason_to_run_eagerly(monkeypatch):
    engine = new_engine(FAMILIES["llama"](), **SETTINGS, **config(Counting()))
    serve(engine, PROMPTS[:1], NEW)

    def fail(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(type(engine._runner._compiled[0]), "_make", fail)
    monkeypatch.setattr(compiled._Current, "batch", None)
    monkeypatch.setattr("tcb.device.attention.PagedBatch.attend", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        serve(engine, PROMPTS[:1], NEW)
    assert torch.is_grad_enabled()
