"""Everything that is refused, by name: what a user can do wrong, through public names alone.

A case is a function of a `World`; it raises, or logs what has no effect. `facts.observe` says what
came of it.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaModel

import tcb
import tcb.kernels
from tests.refusals.values import options, requests, settings
from tests.refusals.world import PROMPT, SMALL, Case, World
from tests.support.families import FAMILIES, REFUSED, VOCAB
from tests.support.fitting import BLOCKS, DIM, FITTING, KV_HEADS, PAGE_SIZE, TOKENS, VALUE_DIM

# models


def models() -> Iterator[tuple[str, Case]]:
    for family in ("bloom", "mamba", "t5", "bert", "stablelm"):
        yield (
            family,
            lambda w, f=family: tcb.generate_batch(REFUSED[f](), [PROMPT], max_new_tokens=2),
        )
    yield "no head", lambda w: tcb.generate_batch(_headless(), [PROMPT])
    yield "prompt learning", _prompt_learning
    for name in ("generate_batch", "init_continuous_batching", "attach"):
        rest = ([PROMPT],) if name == "generate_batch" else ()
        yield (
            f"no model: {name}",
            lambda w, n=name, r=rest: getattr(tcb, n)(torch.nn.Linear(1, 1), *r),
        )


def _headless() -> LlamaModel:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return LlamaModel(LlamaConfig(vocab_size=32, num_attention_heads=2, **sizes))


def _prompt_learning(w: World) -> None:
    wrapper = torch.nn.Module()
    wrapper.peft_config, wrapper.get_base_model = {}, lambda: w.model
    wrapper.active_peft_config = SimpleNamespace(is_prompt_learning=True)
    tcb.generate_batch(wrapper, [PROMPT])


# a manager at the wrong moment


def moments() -> Iterator[tuple[str, Case]]:
    yield "pause without a loop", _pause
    yield "stop inside a pause", _stop_inside_pause
    yield "stop without a loop", lambda w: w.manager().stop()
    yield "start twice", lambda w: _started(w, lambda m: m.start())
    yield "add after stop", lambda w: _stopped(w, lambda m: m.add_request(PROMPT))
    yield (
        "add many after stop",
        lambda w: _stopped(w, lambda m: m.add_requests([PROMPT])),
    )
    yield "handler without an event loop", lambda w: w.manager().register_result_handler("a", print)
    yield "other settings while it runs", _other_settings
    yield "other options while it runs", _other_options
    yield "history while it runs", _history
    yield "a call that needs history while it runs", _batch_with_history
    yield "no such name", lambda w: tcb.no_such_name
    yield "no such kernel", lambda w: tcb.kernels.no_such_kernel
    yield "a batch that fails is logged", lambda w: w.batch([[], PROMPT])


def _pause(w: World) -> None:
    with w.manager().pause():
        pass


def _started(w: World, act: Callable[[Any], Any], **settings: Any) -> Any:
    manager = w.manager(**settings)
    manager.start()
    try:
        return act(manager)
    finally:
        manager.stop(hard_stop=True)


def _stopped(w: World, act: Callable[[Any], Any]) -> Any:
    manager = w.manager()
    manager.start()
    manager.stop()
    return act(manager)


def _stop_inside_pause(w: World) -> None:
    def stop(manager: Any) -> None:
        with manager.pause():
            manager.stop()

    _started(w, stop)


def _other_settings(w: World) -> None:
    other = SMALL | {"page_size": 16}
    _started(w, lambda m: m.adapt(m.generation_config, other))


def _other_options(w: World) -> None:
    _started(w, lambda m: m.adapt(GenerationConfig(num_beams=2)))


def _history(w: World) -> None:
    _started(w, lambda m: setattr(m, "generation_config", GenerationConfig(repetition_penalty=1.5)))


def _batch_with_history(w: World) -> None:
    w.batch(persistent_manager=True)
    manager = w.model._cached_continuous_batching_manager
    manager.start()
    try:
        w.batch(repetition_penalty=1.5)
    finally:
        manager.stop(hard_stop=True)
        tcb.destroy_cached_continuous_batching_manager(w.model)


# paged generate


def paged() -> Iterator[tuple[str, Case]]:
    for name in (
        "assistant_model",
        "streamer",
        "negative_prompt_ids",
        "negative_prompt_attention_mask",
    ):
        yield name, lambda w, n=name: _generate(w, _ids(PROMPT), **{n: [1]})
    yield "no such keyword", lambda w: _generate(w, _ids(PROMPT), no_such_keyword=1)
    yield "an option refused", lambda w: _generate(w, _ids(PROMPT), num_beams=2)
    yield "no inputs", lambda w: _generate(w, None)
    yield "three dimensions", lambda w: _generate(w, _ids([[PROMPT]]))
    yield "no tokens", lambda w: _generate(w, torch.empty(1, 0, dtype=torch.int64))
    yield "a request that fails", lambda w: _generate(w, _ids([VOCAB + 5]))


def _ids(rows: list[Any]) -> torch.Tensor:
    return torch.tensor(rows)


def _generate(w: World, inputs: Any, **keywords: Any) -> Any:
    keywords = {"max_new_tokens": 2, "continuous_batching_config": SMALL} | keywords
    model = tcb.attach(FAMILIES["llama"]())
    return model.generate(inputs, cache_implementation="paged", **keywords)


# kernels

MISFITS: dict[str, list[dict[str, Any]]] = {
    "paged_attention": [
        {"window": 0},
        {"softcap": 0.0},
        {"softcap": math.nan},
        {"scale": -1.0},
        {"query": torch.zeros(TOKENS, 5, DIM), "sinks": None, "out": None},
        {"block_table": torch.zeros(2, 0, dtype=torch.int32)},
    ],
    "paged_decode": [{"window": -3}, {"scale": math.inf}, {"num_splits": 0}, {"num_splits": 129}],
    "write_kv": [
        {
            "key_cache": torch.zeros(BLOCKS, 0, KV_HEADS, DIM),
            "value_cache": torch.zeros(BLOCKS, 0, KV_HEADS, VALUE_DIM),
        },
        {"key_cache": torch.zeros(BLOCKS, PAGE_SIZE, KV_HEADS, DIM).int()},
    ],
    "page_tables": [{"page_size": 0}, {"num_pages": 0}, {"block_tables": []}],
    "sample": [
        {"logits": torch.zeros(3, 0)},
        {"logits": torch.zeros(3, 2**19 + 1)},
        {"logits": torch.zeros(3, 64, dtype=torch.int64)},
        {"temperature": torch.ones(3, dtype=torch.float64)},
        {"do_sample": torch.ones(3)},
        {"seed": torch.ones(4, dtype=torch.int64)},
    ],
}


def kernels() -> Iterator[tuple[str, Case]]:
    for operation, fitting in FITTING.items():
        for name, value in fitting().items():
            if isinstance(value, torch.Tensor):
                yield f"{operation}: rank of {name}", partial(_call, operation, {name: value[None]})
        for place, changes in enumerate(MISFITS.get(operation, ())):
            yield f"{operation}: {', '.join(changes)} ({place})", partial(_call, operation, changes)


def _call(operation: str, changes: dict[str, Any], w: World) -> Any:
    return getattr(tcb.kernels, operation)(**FITTING[operation]() | changes)


CASES: dict[str, Case] = {
    f"{group.__name__}: {name}": case
    for group in (settings, options, requests, models, moments, paged, kernels)
    for name, case in group()
}
