"""Values out of range: settings, generation options, what a request brings."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from transformers import ContinuousBatchingConfig as TheirConfig
from transformers import GenerationConfig

import tcb
from tests.refusals.world import PROMPT, SMALL, Case, FailedOutput, World
from tests.support.families import VOCAB

# settings

SETTINGS: dict[str, list[Any]] = {
    "page_size": [2, 4.5, "8", True, 2**31, None],
    "num_blocks": [0, -1, 1.5, "x"],
    "max_batch_tokens": [0, 2**31, 2.5],
    "max_memory_percent": [0, 1.5, math.nan, "x", 1e-9],
    "max_requests_per_batch": [0, "x"],
    "max_blocks_per_request": [-1, 1.5],
    "allow_block_sharing": [1, None],
    "use_async_batching": [1, "x"],
    "use_cuda_graph": ["x", (True,), (1, 0)],
    "q_padding_interval_size": [-1, None],
    "kv_padding_interval_size": [-1, None],
    "varlen_compile_config": [5],
    "decode_compile_config": ["x"],
    "default_compile_level": [4, True],
    "scheduler_type": ["lifo", None],
    "safety_margin": [-0.1, 1.5, "x"],
    "return_logprobs": [1],
    "seed": [2**63, 1.5],
    "auto_switch_to_flash": [1],
    "cpu_offload_space": [-1, "x", 1e-12],
    "cpu_offload_space_safety_threshold": [1.5, None],
    "max_queue_size": [-1, 1.5],
    "per_request_processors": [1],
    "drop_unsupported_processors": [0],
    "disable_nccl_graph_mixing": [1],
    "cpu_group_timeout": [0, "x"],
    "use_default_compile_configs": [1],
    "max_cached_graphs": [-1, 2.5],
    "block_size": [2, "x"],
    "deterministic": ["on", True],
    "no_such_setting": [1],
}
# accepted, but not what happens
WITHOUT_EFFECT: dict[str, Any] = {
    "max_blocks_per_request": 3,
    "use_cuda_graph": True,
    "q_padding_interval_size": 16,
    "kv_padding_interval_size": 16,
    "max_cached_graphs": 4,
    "deterministic": "batch",
    "cpu_offload_space": 1e6,
}
CONFIGURATIONS: dict[str, Any] = {
    "a number": 5,
    "a text": "page_size=8",
    "a list": [("page_size", 8)],
    "a class": TheirConfig,
    "two page sizes": {"page_size": 8, "block_size": 16},
    "no room for its blocks": {"num_blocks": 10**12},
    "asynchronous with history": {"use_async_batching": True},
}


def settings() -> Iterator[tuple[str, Case]]:
    for name, values in SETTINGS.items():
        for value in values:
            yield f"{name}={value!r}", partial(_configure, {name: value})
    for name, config in CONFIGURATIONS.items():
        yield name, partial(_configure, config)
    yield "transformers' own, out of range", lambda w: _configure(_theirs(page_size=2), w)
    yield "transformers' own, unknown", lambda w: _configure(_theirs(no_such_setting=1), w)
    yield "the class, unknown", lambda w: tcb.ContinuousBatchingConfig(no_such_setting=1)
    yield (
        "the class, two page sizes",
        lambda w: tcb.ContinuousBatchingConfig(page_size=8, block_size=16),
    )
    yield "hints, unknown", lambda w: tcb.WorkloadHints(no_such_hint=1)
    for name, value in WITHOUT_EFFECT.items():
        yield f"{name}={value!r} has no effect", partial(_configure, SMALL | {name: value})
    yield "inside the generation config", _inside_generation_config


def _configure(config: Any, w: World) -> Any:
    penalty = {"repetition_penalty": 1.5} if config == {"use_async_batching": True} else {}
    return tcb.init_continuous_batching(w.model, GenerationConfig(**penalty), config)


def _theirs(**values: Any) -> TheirConfig:
    config = TheirConfig()
    for name, value in values.items():
        setattr(config, name, value)
    return config


def _inside_generation_config(w: World) -> Any:
    config = GenerationConfig(max_new_tokens=2)
    config.continuous_batching_config = tcb.ContinuousBatchingConfig(**SMALL)
    return tcb.init_continuous_batching(w.model, config)


# generation options

OPTIONS: dict[str, list[Any]] = {
    "num_beams": [2],
    "constraints": [["x"]],
    "force_words_ids": [[[1]]],
    "stop_strings": [["x"], "end"],
    "token_healing": [True],
    "max_time": [0, -1.0, "x"],
    "guidance_scale": [1.5],
    "penalty_alpha": [0.6],
    "dola_layers": ["high"],
    "prompt_lookup_num_tokens": [3],
    "assistant_early_exit": [2],
    "is_assistant": [True],
    "output_attentions": [True],
    "output_hidden_states": [True],
    "cache_implementation": ["static"],
    "cache_config": [{"nbits": 4}],
    "max_new_tokens": [0, -1, 2.5, True],
    "max_length": [0, 2.5, "x"],
    "eos_token_id": ["x", 1.5, True, [1, "x"]],
    "bad_words_ids": [[]],
    "repetition_penalty": [-1.0, "x"],
    "no_repeat_ngram_size": [2.5],
    "no_such_option": [1, None],
    "to_dict": [1],
    "_from_model_config": [True],
}
SAMPLING: dict[str, list[Any]] = {
    "temperature": [0.0, -1.0, math.nan, math.inf, "1"],
    "top_k": [-3, 2.5, "x"],
    "top_p": [-0.1, math.nan, "x"],
    "min_p": [1.5, -0.5, "x"],
}


def options() -> Iterator[tuple[str, Case]]:
    for name, values in OPTIONS.items():
        for value in values:
            yield f"{name}={value!r}", lambda w, o={name: value}: w.batch(**o)
    for name, values in SAMPLING.items():
        for value in values:
            yield f"{name}={value!r}", lambda w, o={name: value}: w.batch(do_sample=True, **o)
    for name, value in {"num_beams": 3, "max_new_tokens": 0, "stop_strings": ["x"]}.items():
        yield f"{name} in a config", lambda w, n=name, v=value: _by_config(w, n, v)
    yield "a config that is a dict", lambda w: w.batch(generation_config={"max_new_tokens": 3})
    yield "a config that is a number", lambda w: w.batch(generation_config=5)
    yield (
        "max_length within the prompt",
        lambda w: _failed(w, [7] * 9, max_new_tokens=None, max_length=6),
    )


def _by_config(w: World, name: str, value: Any) -> Any:
    config = GenerationConfig()
    setattr(config, name, value)
    return tcb.init_continuous_batching(w.model, config, SMALL)


# what a request brings

KEYWORDS: dict[str, list[Any]] = {
    "max_new_tokens": [0, -2, 1.5, "4", True],
    "eos_token_id": ["x", 1.5, True],
    "temperature": [0, -1.0, "1", True, math.inf],
    "top_k": [-1, 1.0, True],
    "top_p": [1.01, -0.5, "x"],
    "min_p": [-0.1, 2],
    "do_sample": [1, "yes"],
    "seed": [0.5, True, "x"],
    "repetition_penalty": [1.2],
    "no_such_option": [1],
    "request_id": ["", 7],
}
PROMPTS: dict[str, Any] = {
    "none": None,
    "empty": [],
    "empty tensor": torch.empty(0, dtype=torch.int64),
    "text": "hello",
    "bytes": b"hello",
    "a set": {1, 2},
    "a mapping": {"input_ids": [1]},
    "a number": 7,
    "a boolean inside": [1, True],
    "a float inside": [1, 2.0],
    "a text inside": [1, 2, "3"],
    "none inside": [1, None],
    "two dimensions": [[1, 2]],
    "a tensor of two dimensions": torch.ones(2, 2, dtype=torch.int64),
    "a tensor of floats": torch.ones(2),
    "negative": [1, -1, 2],
    "beyond the vocabulary": [1, VOCAB],
    "longer than memory": [3] * 5000,
}


def requests() -> Iterator[tuple[str, Case]]:
    for name, values in KEYWORDS.items():
        for value in values:
            add = partial(_add, PROMPT, {name: value})
            yield f"{name}={value!r}", add
            if name in ("temperature", "max_new_tokens", "no_such_option"):
                yield f"{name}={value!r} for many", partial(_add_many, {name: value})
    for name, prompt in PROMPTS.items():
        yield f"prompt: {name}", partial(_add, prompt, {})
        yield f"prompt among many: {name}", lambda w, p=prompt: _failed(w, p)
    for name, inputs in {
        "a mapping": {"ids": [[1]]},
        "text": "x",
        "none": None,
        "5": 5,
    }.items():
        yield f"prompts: {name}", lambda w, i=inputs: w.batch(i)
    yield "id: of a live request", _live_id
    yield "id: of a live fork", _live_fork


def _add(prompt: Any, keywords: dict[str, Any], w: World) -> Any:
    return w.waiting.add_request(prompt, **keywords)


def _add_many(keywords: dict[str, Any], w: World) -> Any:
    return w.waiting.add_requests([PROMPT], **keywords)


def _failed(w: World, prompt: Any, **keywords: Any) -> None:
    (output,) = w.batch([prompt], **keywords).values()
    raise FailedOutput(output.error)


def _live_id(w: World) -> None:
    manager = w.manager()
    manager.add_request(PROMPT, request_id="a")
    manager.add_request(PROMPT, request_id="a")


def _live_fork(w: World) -> None:
    manager = w.manager()
    manager.add_request(PROMPT, request_id="b__child#0")
    manager.num_return_sequences = 2
    manager.add_request(PROMPT, request_id="b")
