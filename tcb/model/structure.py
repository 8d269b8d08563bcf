"""Tells whether a model's modules and configurations are still those that were looked at.

Objects are compared by identity: whatever was exchanged, though for its equal, counts as changed.
Weights are not looked at, and neither is what is inside other objects that a module holds.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import is_
from types import CellType, MethodType
from typing import Any

from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from transformers import PreTrainedConfig

from tcb.model.twin import (
    MANAGER,
    PREPARED,
    TWIN_CONFIG,
    cell_content,
    is_dynamic_rope,
    is_gradient_hook,
    modules_of,
    unwrap,
)

# attributes that change without a module or a configuration meaning anything else
_UNSTABLE = frozenset(
    {
        "training",
        "gradient_checkpointing",
        "_gradient_checkpointing_func",
        "_require_grads_hook",
        "_require_grads_hooks",
        "_loss_function",
        "_previous_max_cache_length",
        "_is_hf_initialized",
        "_output_capturing_hooks_installed",
        "_compiled_call_impl",
        "_is_torch_compile",
        "generation_config",
        MANAGER,
        PREPARED,
        *TWIN_CONFIG,
    }
)
# packages whose hooks keep what they read in modules, where it is seen
_STATE_IN_MODULES = frozenset({"torch", "transformers", "accelerate", "peft"})
_OBJECTS = (nn.Module, PreTrainedConfig)
_CONTAINERS = (dict, list, tuple, set, PreTrainedConfig)


@dataclass(frozen=True, slots=True)
class Structure:
    """What a model was made of.

    root    what the model itself held; not the model, which would then be held by what it holds
    rest    every other module, configuration and container that held something, with that
    empty   containers that held nothing: nearly all, since a module has a dozen for its hooks
    """

    root: tuple[Any, ...]
    rest: tuple[tuple[Any, tuple[Any, ...]], ...]
    empty: tuple[Any, ...]

    def matches(self, model: nn.Module) -> bool:
        """Whether `model` is still made of the very same objects.

        False once a module was added, removed or replaced, or an attribute or hook of one was set:
        adapters loaded, chosen or disabled, wrappers put around `forward`; or an attribute of a
        configuration. Changes of weights, of train mode and of gradient checkpointing do not
        count. Takes about a millisecond for 400 modules.
        """
        return (
            _is_same(_held(unwrap(model)), self.root)
            and all(_is_same(_held(holder), held) for holder, held in self.rest)
            and not any(_held(holder) for holder in self.empty if holder)
        )


def structure(model: nn.Module, copied: Iterable[Any] = ()) -> Structure:
    """What `model` is made of now. A rotary embedding that writes its frequencies is left out.

    copied   what else to look at: lists, dictionaries and cells of closures of which a twin has its
             own
    """
    root, seen = unwrap(model), set[int]()
    records = [
        record
        for module in modules_of(root)
        if not is_dynamic_rope(module)
        for record in _records(module, seen)
        if record[0] is not root
    ]
    records += [(holder, _held(holder)) for holder in copied]
    rest = tuple(record for record in records if record[1])
    return Structure(_held(root), rest, tuple(holder for holder, held in records if not held))


def reads_elsewhere(model: nn.Module) -> bool:
    """Whether hooks, parametrizations or a `forward` set on a module were brought by others than
    torch, transformers and the libraries that put theirs there with all state in modules.

    Such code may read what no look at the model finds: a strength in a dictionary, a global.
    """
    return bool(_global_forward_hooks or _global_forward_pre_hooks) or any(
        not _is_known(code) for module in modules_of(model) for code in _code_on(module)
    )


def _code_on(module: nn.Module) -> Iterator[Any]:
    """What runs in a module's call beside the forward of its class."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        yield from (hook for hook in hooks.values() if not is_gradient_hook(hook))
    if "forward" in module.__dict__:
        yield module.__dict__["forward"]
    parametrized: Any = module._modules.get("parametrizations") or {}
    for parametrizations in parametrized.values():
        yield from map(type, parametrizations)


def _is_known(code: Any) -> bool:
    while isinstance(code, partial | MethodType):
        code = code.func if isinstance(code, partial) else code.__func__
    return getattr(code, "__module__", "").partition(".")[0] in _STATE_IN_MODULES


def _records(holder: Any, seen: set[int]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """`holder` and what it holds, and the same of whatever in it may be written in place."""
    held = _held(holder)
    yield holder, held
    seen.add(id(holder))
    if isinstance(holder, nn.Module):
        # weights are replaced without a module meaning anything else
        seen |= {id(holder._parameters), id(holder._buffers)}
    for value in held:
        if isinstance(value, _CONTAINERS) and id(value) not in seen:
            yield from _records(value, seen)


def _held(holder: Any) -> tuple[Any, ...]:
    """What an object holds. Of a module its class's `forward` too, which may be patched."""
    if isinstance(holder, _OBJECTS):
        kind = type(holder)
        values = [value for name, value in holder.__dict__.items() if name not in _UNSTABLE]
        return kind, getattr(kind, "forward", None), *values
    if isinstance(holder, CellType):
        return (cell_content(holder),)
    items = holder.values() if isinstance(holder, dict) else holder
    return tuple(item for item in items if not is_gradient_hook(item))


def _is_same(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))
