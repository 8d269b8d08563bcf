"""Keeps the engine of a manager and the settings it was built with: built, adapted, given back.

It does not know requests or threads; who calls sees to it that nothing runs while it is exchanged.
"""

import threading
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from tcb.engine import Engine
from tcb.options.generation import GenerationOptions
from tcb.planning.config import ContinuousBatchingConfig, check
from tcb.planning.limits import WorkloadHints

# settings that an engine never sees
_NOT_OF_THE_ENGINE = {"seed": None, "max_queue_size": 0, "per_request_processors": False}


class EngineKeeper:
    """One model's engine, or the wish for one.

    settings   what the user set, checked; nothing resolved
    resolved   a copy of it into which the sizes of the engine are written
    engine     None before `ensure` and after `close`
    """

    def __init__(self, model: torch.nn.Module, config: Any, hints: WorkloadHints | None):
        self.model, self.hints = model, hints
        self.settings = read_settings(config)
        self.resolved = deepcopy(self.settings)
        self.engine: Engine | None = None
        self._place: tuple | None = None
        self._lock = threading.RLock()

    def ensure(self, options: GenerationOptions) -> Engine:
        """The engine, built now if there is none. Raises what its constructor raises."""
        with self._lock:
            if self.engine is None:
                with plain_mode(self.model.device):
                    self.engine = Engine(
                        self.model, options, self.settings, self.hints or WorkloadHints()
                    )
                self.resolved = _resolved(self.settings, self.engine)
                self._place = _place(self.model)
            return self.engine

    def close(self) -> None:
        """Give the engine's memory back."""
        with self._lock:
            engine, self.engine = self.engine, None
            if engine is not None:
                engine.close()

    def forget(self) -> None:
        """The engine was closed by the thread that had it."""
        with self._lock:
            self.engine = None

    def use(self, settings: ContinuousBatchingConfig) -> None:
        """Build the next engine with these; the one there is has to serve them."""
        self.settings = settings
        if self.engine is None:
            self.resolved = deepcopy(settings)
        else:
            self.resolved = _resolved(settings, self.engine)

    def serves(self, options: GenerationOptions, settings: ContinuousBatchingConfig) -> bool:
        """Whether the engine there is, if any, is as good for these as one built for them."""
        engine = self.engine
        return engine is None or (
            _of_the_engine(settings) == _of_the_engine(self.settings)
            and options.needs_history <= engine.options.needs_history
            and self._place == _place(self.model)
        )


def read_settings(config: Any) -> ContinuousBatchingConfig:
    """A checked copy of a configuration of either package."""
    settings = ContinuousBatchingConfig.read(config)
    check(settings)
    return settings


def _of_the_engine(settings):
    return replace(settings, **_NOT_OF_THE_ENGINE)


def _place(model):
    return model.device, model.dtype


def _resolved(settings, engine):
    """The settings with the sizes that the engine has; blocks are counted as the user does."""
    limits = engine.limits
    return replace(
        deepcopy(settings),
        page_size=limits.page_size,
        num_blocks=limits.num_blocks // len(engine.state.groups),
        max_batch_tokens=limits.max_batch_tokens,
        max_requests_per_batch=limits.max_requests,
        safety_margin=limits.safety_margin,
        use_async_batching=bool(limits.depth),
    )


@contextmanager
def plain_mode(device):
    """What the background thread runs in, whatever the caller's thread is set to."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        yield
