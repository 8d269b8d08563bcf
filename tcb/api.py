"""The functions that users call: one call for many prompts, or a manager to talk to.

It does not know threads or engines; it reads what the user hands in, and asks a manager.
"""

import logging
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from torch import nn

from tcb.compat import install as drop_in
from tcb.compat.generate import generate_paged
from tcb.model.twin import plain_model
from tcb.planning.limits import WorkloadHints
from tcb.planning.request import GenerationOutput
from tcb.service.arguments import (
    choose_generation_config,
    config_within,
    hints_of,
    list_of_prompts,
)
from tcb.service.batch_call import BatchCall
from tcb.service.manager import ContinuousBatchingManager

logger = logging.getLogger("ContinuousBatchingLogger")

_CACHED = "_cached_continuous_batching_manager"


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
             tensor or array; rows are taken as they are, padding included

    Further keywords are generation options, as in `generate`: `max_new_tokens=32`. With several
    return sequences the forks `<id>__child#<i>` come before their parent. A prompt that cannot be
    served has an output too: FAILED, with the reason in `error`. `persistent_manager` keeps memory
    and cached prefixes for the next call, until `destroy_cached_continuous_batching_manager`.

    Raises TypeError for an unknown keyword, ValueError for an option, a setting or a model that
    cannot be served, MemoryError where the device has no room; all of that before anything starts.
    """
    model = plain_model(model)
    config = choose_generation_config(model, generation_config, kwargs)
    prompts = list_of_prompts(inputs)
    if not prompts:
        return {}
    manager = _running(model)
    if manager is None:
        hints = hints_of(prompts, config, persistent_manager)
        manager = init_continuous_batching(model, config, continuous_batching_config, hints)
    elif continuous_batching_config is not None:
        manager.adapt(manager.generation_config, continuous_batching_config)
    call = BatchCall(manager, prompts, config, record_timestamps, progress_bar)
    if manager.is_running() or manager.continuous_batching_config.max_queue_size:
        with _session(model, manager, persistent_manager, warmup):
            outputs = call.wait()
    else:
        try:
            outputs = call.serve(keep=persistent_manager)
        finally:
            _let_go(model, manager)
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
    config = choose_generation_config(model, generation_config)
    if continuous_batching_config is None:
        continuous_batching_config = config_within(config)
    kept = getattr(model, _CACHED, None)
    if isinstance(kept, ContinuousBatchingManager):
        kept.adapt(config, continuous_batching_config)
        return kept
    return _manager_class()(model, config, continuous_batching_config, workload_hints)


def destroy_cached_continuous_batching_manager(model: nn.Module) -> None:
    """Stop the manager kept on the model, if there is one, and give its memory back."""
    model = plain_model(model)
    kept = getattr(model, _CACHED, None)
    if isinstance(kept, ContinuousBatchingManager):
        kept.destroy()
        delattr(model, _CACHED)


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
    model = plain_model(model)
    running = _running(model)
    before = None if running is None else running.generation_config
    manager = init_continuous_batching(
        model, generation_config, continuous_batching_config, workload_hints
    )
    with _session(model, manager, persistent_manager, warmup, block, timeout):
        try:
            yield manager
        finally:
            if running is not None:
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


def _running(model: nn.Module) -> ContinuousBatchingManager | None:
    """The manager kept on the model, if it runs."""
    kept = getattr(model, _CACHED, None)
    is_ours = isinstance(kept, ContinuousBatchingManager)
    return kept if is_ours and kept.is_running() else None


@contextmanager
def _session(
    model: nn.Module,
    manager: ContinuousBatchingManager,
    keep: bool,
    warmup: bool,
    block: bool = True,
    timeout: float | None = None,
) -> Generator[None]:
    """A session of the manager; once it has stopped, it is on the model only if it is kept."""
    try:
        with manager.sessions.enter(manager, block, timeout, keep, warmup):
            yield
    finally:
        _let_go(model, manager)


def _let_go(model: nn.Module, manager: ContinuousBatchingManager) -> None:
    """Leave a manager on the model only while it has an engine."""
    if not manager.has_engine and getattr(model, _CACHED, None) is manager:
        delattr(model, _CACHED)


@cache
def _manager_class() -> type[ContinuousBatchingManager]:
    """Our manager as an instance of transformers' class too: their code asks for one."""
    from transformers import ContinuousBatchingManager as Theirs

    name, doc = ContinuousBatchingManager.__name__, ContinuousBatchingManager.__doc__
    return type(name, (ContinuousBatchingManager, Theirs), {"__doc__": doc})


def _methods() -> dict[str, Callable]:
    """What replaces the methods of transformers models, by their names."""
    return {
        "generate_batch": generate_batch,
        "init_continuous_batching": init_continuous_batching,
        "continuous_batching_context_manager": continuous_batching_context_manager,
        "destroy_cached_continuous_batching_manager": destroy_cached_continuous_batching_manager,
        "generate_paged": partial(generate_paged, generate_batch),
    }
