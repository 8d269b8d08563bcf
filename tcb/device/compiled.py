"""Calls a model through `torch.compile`: one program for all sizes of batches, attention and chosen
products within it as operators of their own.

What a batch holds beside its tokens is no part of a program: attention is one operator a layer,
which asks the batch that this thread is carrying out. So a program is made for one token and for
more, for one sample and for more, and for nothing else. What torch cannot compile runs eagerly, and
one line says why.
"""

import logging
import shutil
import threading
import types
from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor, nn

from tcb.model.attention_hook import Batch, call_model, forward
from tcb.planning.compile import Compilation

logger = logging.getLogger("ContinuousBatchingLogger")

_LIBRARY = torch.library.Library("tcb", "FRAGMENT")
# modes that capture graphs, and their like that do not: a batch is no part of a captured graph
_WITHOUT_GRAPHS = {
    "reduce-overhead": "default",
    "max-autotune": "max-autotune-no-cudagraphs",
}


class _Current(threading.local):
    """The batch that this thread is carrying out."""

    batch: Batch | None = None


class _Attention:
    """What goes through a compiled model in the place of a batch."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """One operator, which the batch of the moment carries out."""
        return torch.ops.tcb.attend.default(layer, query, key, value, sinks)


_current, _ATTENTION = _Current(), _Attention()


def _attend(layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
    assert _current.batch is not None, "a compiled model is called through `Compiled` only"
    return _current.batch.attend(layer, query, key, value, sinks)


def _attend_fake(
    layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
) -> Tensor:
    return query.new_empty((*query.shape[:2], value.shape[2]))


_LIBRARY.define(
    "attend(int layer, Tensor query, Tensor key, Tensor value, Tensor? sinks) -> Tensor"
)
_LIBRARY.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("tcb::attend", _attend_fake, lib=_LIBRARY)


class Compiled:
    """`call_model` for one kind of batch, compiled at its first call and for each new twin."""

    def __init__(self, name: str, compilation: Compilation) -> None:
        self._name, self._compilation = name, compilation
        self._twin: nn.Module | None = None
        self._program: Callable[..., Tensor] | None = None

    def __call__(
        self,
        twin: nn.Module,
        input_ids: Tensor,
        position_ids: Tensor,
        sample_index: Tensor,
        batch: Batch,
        *,
        keeps_logits: bool,
    ) -> Tensor:
        """What `call_model` returns for the same arguments."""
        tensors = input_ids, position_ids, sample_index
        is_first = self._twin is not twin
        if is_first:
            self._twin, self._program = twin, self._make(input_ids.device)
        if self._program is None:
            return call_model(twin, *tensors, batch, keeps_logits=keeps_logits)
        _current.batch, start = batch, perf_counter()
        try:
            if is_first:
                logger.info("compiling the model for %s batches", self._name)
            # modes are set around a program: one that fails within would not set them back
            with torch.autocast(input_ids.device.type, enabled=False), torch.no_grad():
                logits = self._program(twin, *tensors, _ATTENTION, keeps_logits=keeps_logits)
            if is_first:
                logger.info("compiled in %.1f s", perf_counter() - start)
            return logits
        except Exception as error:
            if not _is_of_compiler(error):
                raise
            # raised while a program is made: nothing of the batch has run
            self._program = None
            self._log_eager(_reason(error))
            return call_model(twin, *tensors, batch, keeps_logits=keeps_logits)
        finally:
            _current.batch = None

    def _make(self, device: torch.device) -> Callable[..., Tensor] | None:
        asked = self._compilation
        if asked.backend == "inductor" and device.type == "cpu" and not _has_compiler():
            self._log_eager("no C++ compiler is installed")
            return None
        takes_mode = asked.backend == "inductor" and asked.options is None
        try:
            return torch.compile(
                _with_own_code(forward),
                fullgraph=True,
                dynamic=asked.dynamic,
                backend=asked.backend,
                mode=_WITHOUT_GRAPHS.get(asked.mode, asked.mode) if takes_mode else None,
                options=None if asked.options is None else dict(asked.options),
            )
        except Exception as error:
            # an unknown backend or option
            self._log_eager(_reason(error))
            return None

    def _log_eager(self, reason: str) -> None:
        logger.warning("%s batches are not compiled and run eagerly: %s", self._name, reason)


def compiled_calls(
    compilations: tuple[Compilation | None, Compilation | None],
) -> tuple[Compiled | None, Compiled | None]:
    """How mixed and decoding batches call the model; None where they do so eagerly."""
    mixed, decode = compilations
    if mixed == decode:
        # one program serves both
        return 2 * (_compiled("all", mixed),)
    return _compiled("mixed", mixed), _compiled("decoding", decode)


def _compiled(name: str, compilation: Compilation | None) -> Compiled | None:
    return None if compilation is None else Compiled(name, compilation)


def _with_own_code(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A copy of a function: programs are kept with its code, which engines would share."""
    assert isinstance(function, types.FunctionType)
    code, scope = function.__code__.replace(), function.__globals__
    copy = types.FunctionType(code, scope, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _has_compiler() -> bool:
    """Whether Inductor finds a C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return shutil.which(get_cpp_compiler()) is not None
    except Exception:
        return False


def _reason(error: Exception) -> str:
    """The first paragraph of what an error says, in one line."""
    text, _, _ = str(error).strip().partition("\n\n")
    return " ".join(text.split()) or type(error).__name__


def _is_of_compiler(error: Exception) -> bool:
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
