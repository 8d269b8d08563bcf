"""Put functions in the place of transformers' own methods, for all models or for one, and back."""

import sys
import threading
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from types import FrameType
from typing import Any

from torch import nn

# not a method of models: what answers `generate(cache_implementation="paged")`
PAGED = "generate_paged"

_lock = threading.Lock()
# (class, name) -> what was there; empty while nothing is installed
_originals: dict[tuple[type, str], Any] = {}


def install(functions: Mapping[str, Callable]) -> None:
    """Let all transformers models have these methods; once installed, nothing happens."""
    from transformers.generation import ContinuousMixin, GenerationMixin

    with _lock:
        if _originals:
            return
        for name, function in functions.items():
            if name != PAGED:
                _replace(ContinuousMixin, name, _MethodOfTheAsked(_as_method(function)))
        generate = GenerationMixin.generate
        _replace(GenerationMixin, "generate", _generate(generate, functions[PAGED]))


def uninstall() -> None:
    """Put back what was there; if nothing is installed, nothing happens."""
    with _lock:
        for (owner, name), original in _originals.items():
            setattr(owner, name, original)
        _originals.clear()


def attach(model: nn.Module, functions: Mapping[str, Callable]) -> None:
    """Let one model have these methods, as attributes of the instance."""
    for name, function in functions.items():
        if name != PAGED:
            model.__dict__[name] = _as_method(function).__get__(model)
    model_class: Any = type(model)
    generate = model_class.generate
    model.__dict__["generate"] = _generate(generate, functions[PAGED]).__get__(model)


def _replace(owner: type, name: str, function: Any) -> None:
    _originals[owner, name] = owner.__dict__[name]
    setattr(owner, name, function)


class _MethodOfTheAsked:
    """A method that binds to the wrapper which was asked for it, where one passes on what it does
    not have itself to the model inside it.

    PEFT's prompt tuning is such a wrapper: bound to the model inside it, the method would leave the
    learned prompt out.
    """

    def __init__(self, method: Callable) -> None:
        self._method: Any = method

    def __get__(self, model: nn.Module | None, owner: type) -> Any:
        if model is None:
            return self._method
        # each `__getattr__` on the stack passes the name on, the outermost was asked
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_name == "__getattr__":
            model = frame.f_locals[frame.f_code.co_varnames[0]]
            frame = frame.f_back
        return self._method.__get__(model)


def _as_method(function: Callable) -> Any:
    """A function of a model as a plain function, so that it binds like one."""

    @wraps(function)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return method


def _generate(generate: Callable, generate_paged: Callable) -> Any:
    """transformers' `generate`, but for the calls that ask for pages."""
    names = list(signature(generate).parameters)[1:]

    @wraps(generate)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("cache_implementation") != "paged":
            return generate(self, *args, **kwargs)
        return generate_paged(self, **dict(zip(names, args, strict=False)), **kwargs)

    return method
