"""The functions that users call: one call for many prompts, or a manager to talk to."""

import logging
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tcb.compat import install as drop_in
from tcb.compat.attributes import kept_on
from tcb.compat.generate import generate_paged
from tcb.model.twin import plain_model
from tcb.options.generation import GenerationOptions, config_within, read_options
from tcb.options.inputs import list_of_prompts
from tcb.planning.limits import WorkloadHints
from tcb.planning.output import GenerationOutput
from tcb.service.intake import hints_of
from tcb.service.manager import ContinuousBatchingManager

logger = logging.getLogger("ContinuousBatchingLogger")


def generate_batch(
    model: nn.Module,
    inputs: Iterable[Any],
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    **kwargs: Any,
) -> dict[str, GenerationOutput]:
    """What `model.generate` would give for each prompt, by request id, in the order of the prompts.

    inputs   prompts: lists of token ids, one-dimensional tensors or arrays, or the rows of one
             tensor or array, which are taken as they are, padding included; or what a tokenizer
             returns, whose `attention_mask` says what is padding; or texts, with `tokenizer=`

    Further keywords are generation options, as in `generate`: `max_new_tokens=32`, and
    `logits_processor`, `stopping_criteria`, `prefix_allowed_tokens_fn` and, for `stop_strings` and
    prompts that are texts, `tokenizer`. With several
    return sequences the forks `<id>__child#<i>` come before their parent. A prompt that cannot be
    served has an output too: FAILED, with the reason in `error`. `persistent_manager` keeps memory
    and cached prefixes for the next call, until `destroy_cached_continuous_batching_manager`.

    Raises TypeError for an unknown keyword, ValueError for an option, a setting or a model that
    cannot be served, MemoryError where the device has no room; all of that before anything starts.
    """
    model = plain_model(model)
    options = read_options(model, generation_config, kwargs)
    prompts = list_of_prompts(inputs, options.own.tokenizer)
    if not prompts:
        return {}
    hints = hints_of(prompts, options, persistent_manager)
    manager = _manager_for(model, options, continuous_batching_config, hints)
    with manager.session(persistent_manager, warmup):
        ids = manager.submit(prompts, options, record_timestamps)
        outputs = manager.wait(ids, progress_bar)
    failed = [output for output in outputs.values() if output.error is not None]
    if failed:
        count, first = f"{len(failed)} of {len(outputs)}", failed[0]
        logger.error("%s requests failed; %s: %s", count, first.request_id, first.error)
    return outputs


def init_continuous_batching(
    model: nn.Module,
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    workload_hints: WorkloadHints | None = None,
) -> ContinuousBatchingManager:
    """A manager for this model, not started yet: the one kept on the model if there is one.

    A kept manager serves by the settings of this call from now on; None keeps its configuration.
    Raises what `ContinuousBatchingManager` raises.
    """
    model = plain_model(model)
    options = read_options(model, generation_config)
    return _idle_manager(model, options, continuous_batching_config, workload_hints)


def destroy_cached_continuous_batching_manager(model: nn.Module) -> None:
    """Stop the manager kept on the model, if there is one, and give its memory back."""
    kept = kept_on(plain_model(model))
    if kept is not None:
        kept.destroy()
        kept.settle()


@contextmanager
def continuous_batching_context_manager(
    model: nn.Module,
    generation_config: Any = None,
    block: bool = True,
    timeout: float | None = None,
    continuous_batching_config: Any = None,
    persistent_manager: bool = False,
    warmup: bool = True,
    workload_hints: WorkloadHints | None = None,
) -> Generator[ContinuousBatchingManager]:
    """A running manager, stopped at the end: after all its requests, or at once if the body raised.

    block, timeout       wait for the end of its thread, `timeout` seconds at most
    persistent_manager   keep it on the model, with its memory and cached prefixes
    warmup               allocate before the thread starts

    A kept manager that runs already is handed out too; who started it stops it, or the last of the
    calls inside it. Outside, it serves by the settings that it had before.
    """
    joined = kept_on(plain_model(model))
    before = joined.options if joined is not None and joined.is_running() else None
    manager = init_continuous_batching(
        model, generation_config, continuous_batching_config, workload_hints
    )
    with manager.session(persistent_manager, warmup, block, timeout, background=True):
        try:
            yield manager
        finally:
            if before is not None:
                manager.adapt(before)


def install() -> None:
    """Let every transformers model generate through this package, those that exist included.

    `model.generate_batch`, `init_continuous_batching`, `continuous_batching_context_manager`,
    `destroy_cached_continuous_batching_manager` and `generate(cache_implementation="paged")` are
    ours until `uninstall`. Calling it again changes nothing.
    """
    drop_in.install(_methods())


def uninstall() -> None:
    """Give transformers back what `install` replaced."""
    drop_in.uninstall()


def attach(model: nn.Module) -> nn.Module:
    """`install` for one model; returns it. Deleting the attributes of the instance undoes it."""
    drop_in.attach(plain_model(model), _methods())
    return model


def _manager_for(
    model: PreTrainedModel, options: GenerationOptions, config: Any, hints: WorkloadHints
) -> ContinuousBatchingManager:
    """The manager that serves a call: the model's running one, whose own options stay, or an idle
    one.
    """
    running = kept_on(model)
    if running is None or not running.is_running():
        return _idle_manager(model, options, config, hints)
    if config is not None:
        running.adapt(running.options, config)
    return running


def _idle_manager(
    model: PreTrainedModel, options: GenerationOptions, config: Any, hints: WorkloadHints | None
) -> ContinuousBatchingManager:
    """The manager kept on the model, which takes these over, or a new one."""
    if config is None:
        config = config_within(options.generation_config)
    kept = kept_on(model)
    if kept is None:
        return ContinuousBatchingManager(model, options, config, hints)
    kept.adapt(options, config)
    return kept


def _methods() -> dict[str, Callable]:
    """What replaces the methods of transformers models, by their names."""
    return {
        "generate_batch": generate_batch,
        "init_continuous_batching": init_continuous_batching,
        "continuous_batching_context_manager": continuous_batching_context_manager,
        "destroy_cached_continuous_batching_manager": destroy_cached_continuous_batching_manager,
        "generate_paged": partial(generate_paged, generate_batch),
    }
