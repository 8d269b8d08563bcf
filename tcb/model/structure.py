"""Tells whether a model's modules and configurations are still those that were looked at.

Objects are compared by identity: whatever was exchanged, though for its equal, counts as changed.
Weights are not looked at, and neither is what is inside other objects that a module holds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from tcb.model.twin import (
    MANAGER,
    PREPARED,
    TWIN_CONFIG,
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
# weights are replaced without a module meaning anything else
_WEIGHTS = ("_parameters", "_buffers")
_HOLDERS = (dict, list, tuple, set, PreTrainedConfig)


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


def structure(model: nn.Module) -> Structure:
    """What `model` is made of now. A rotary embedding that writes its frequencies is left out."""
    root, seen = unwrap(model), set[int]()
    records = [
        (holder, _held(holder))
        for module in modules_of(root)
        if not is_dynamic_rope(module)
        for holder in _holders(module, seen)
        if holder is not root
    ]
    rest = tuple((holder, held) for holder, held in records if held)
    return Structure(_held(root), rest, tuple(holder for holder, held in records if not held))


def _holders(start: Any, seen: set[int]) -> Iterator[Any]:
    """`start`, and whatever it holds that may be written in place, at any depth."""
    seen.add(id(start))
    yield start
    weights = [start.__dict__[name] for name in _WEIGHTS] if isinstance(start, nn.Module) else []
    for value in _held(start):
        is_weights = any(value is own for own in weights)
        if isinstance(value, _HOLDERS) and id(value) not in seen and not is_weights:
            yield from _holders(value, seen)


def _held(holder: Any) -> tuple[Any, ...]:
    """What an object holds. Of a module its class's `forward` too, which may be patched."""
    if isinstance(holder, nn.Module | PreTrainedConfig):
        kind = type(holder)
        names = holder.__dict__.items()
        values = [value for name, value in names if name not in _UNSTABLE]
        return kind, getattr(kind, "forward", None), *values
    items = holder.values() if isinstance(holder, dict) else holder
    return tuple(item for item in items if not is_gradient_hook(item))


def _is_same(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))
