"""Clones a model's tree of modules around the very same weights, so that the engine may call it its
own way while the original stays as it was.

A twin has its own modules, its own evaluation mode and its own configuration objects; parameters
and buffers are shared as dictionaries, so what is trained, moved, cast or replaced in the original
is seen by the twin. It knows nothing of attention, caches or batches.
"""

import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from tcb.model.attention_hook import ATTENTION, register

# configuration that a twin answers with, whatever the original says: plain outputs, nothing kept
_TWIN_CONFIG = {
    "_output_attentions": False,
    "output_hidden_states": False,
    "return_dict": True,
    "use_cache": False,
}
# attributes of a module that change without the module meaning anything else
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
        "_cached_continuous_batching_manager",
        "_compiled_call_impl",
        "generation_config",
    }
)
# hooks that come and go with gradient checkpointing, and have no part in a twin
_GRADIENT_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")
# endings of the names of a module's dictionaries of hooks
_HOOKS = ("_hooks", "_with_kwargs", "_always_called")
_KEY = "_tcb_origin"


@dataclass(frozen=True, slots=True)
class _Record:
    """What one module of the original looked like.

    values     its attributes
    contents   those of them that are containers, with what they held
    """

    module: nn.Module
    values: tuple[Any, ...]
    contents: tuple[tuple[dict | list, tuple[Any, ...]], ...]

    def holds(self) -> bool:
        return _is_same(_stable_values(self.module), self.values) and all(
            _is_same(_items(holder), held) for holder, held in self.contents if holder or held
        )


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a twin comes from, kept with the twin."""

    root: nn.Module
    records: tuple[_Record, ...]
    configs: tuple[PreTrainedConfig, ...]


def twin(model: nn.Module) -> nn.Module:
    """Clone `model`: shared parameters and buffers, own modules and configurations, `eval()`.

    Every configuration object of the clone names our attention function. Methods and hooks that
    were bound to modules of the original (accelerate, patched `forward`) are bound to the clone's;
    compiled wrappers are left out. Writes nothing to the original.
    """
    register()
    root = unwrap(model)
    cloner = _Cloner()
    clone = cloner.clone_tree(root)
    records = tuple(_record(module) for module in cloner.originals if not is_dynamic_rope(module))
    origin = _Origin(root, records, tuple(cloner.configs.values()))
    clone.__dict__[_KEY] = origin
    return clone


def is_current(clone: nn.Module, model: nn.Module) -> bool:
    """Whether the modules of `model` are still those that were cloned.

    False once a module was added, removed or replaced, or an attribute or hook of one was set:
    adapters loaded, chosen or disabled, wrappers put around `forward`. Keys and values computed
    before then are stale. Changes of weights, of train mode and of gradient checkpointing do not
    count. Takes about a millisecond for 400 modules.
    """
    origin = clone.__dict__[_KEY]
    return origin.root is unwrap(model) and all(record.holds() for record in origin.records)


def set_attention(clone: nn.Module, name: str) -> None:
    """Let the configurations of a twin name another registered attention function."""
    for config in clone.__dict__[_KEY].configs:
        config.__dict__["_attn_implementation_internal"] = name


def unwrap(model: nn.Module) -> nn.Module:
    """The module that `torch.compile` wrapped, or `model` itself."""
    while "dynamo_ctx" in model.__dict__ and "_orig_mod" in model._modules:
        model = model._modules["_orig_mod"]
    return model


class _Cloner:
    """Owns the correspondence of one original and one clone."""

    def __init__(self):
        self.originals: list[nn.Module] = []
        self.modules: dict[int, nn.Module] = {}
        self.configs: dict[int, PreTrainedConfig] = {}
        self._functions: dict[int, Callable] = {}

    def clone_tree(self, root: nn.Module) -> nn.Module:
        """Two passes: empty modules first, so that references in any direction can be resolved."""
        for original in _unwrapped_modules(root):
            self.originals.append(original)
            self.modules[id(original)] = type(original).__new__(type(original))
        for original in self.originals:
            self._fill(original, self.modules[id(original)])
        return self.modules[id(root)]

    def _fill(self, original: nn.Module, clone: nn.Module) -> None:
        state = {}
        for name, value in original.__dict__.items():
            if name in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
                state[name] = value
            elif name == "_modules" or (name.endswith(_HOOKS) and isinstance(value, dict)):
                # own dictionaries: what is added to the clone does not reach the original
                state[name] = type(value)(
                    (key, self.rebind(item))
                    for key, item in value.items()
                    if not _is_gradient_hook(item)
                )
            elif name not in ("_compiled_call_impl", _KEY):
                state[name] = self.rebind(value)
        state["training"] = False
        if "gradient_checkpointing" in state:
            state["gradient_checkpointing"] = False
        if is_dynamic_rope(original):
            # these write their frequencies in forward
            state["_buffers"] = {
                name: None if buffer is None else buffer.clone()
                for name, buffer in original._buffers.items()
            }
        clone.__dict__.update(state)

    def rebind(self, value: Any) -> Any:
        """`value`, with modules and configurations of the original exchanged for the clone's.

        The same object is returned where nothing in it refers to the original.
        """
        if isinstance(value, nn.Module):
            return self.modules.get(id(unwrap(value)), value)
        if isinstance(value, PreTrainedConfig):
            return self._config(value)
        if isinstance(value, types.MethodType):
            owner = self.rebind(value.__self__)
            function = self.rebind(value.__func__)
            same = owner is value.__self__ and function is value.__func__
            return value if same else types.MethodType(function, owner)
        if isinstance(value, partial):
            return self._partial(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if type(value) in (list, tuple):
            items = [self.rebind(item) for item in value]
            return value if all(map(is_, items, value)) else type(value)(items)
        if type(value) is dict:
            items = {key: self.rebind(item) for key, item in value.items()}
            return value if all(map(is_, items.values(), value.values())) else items
        return value

    def _config(self, original: PreTrainedConfig) -> PreTrainedConfig:
        if id(original) not in self.configs:
            config = type(original).__new__(type(original))
            self.configs[id(original)] = config
            # past __setattr__, which renames attributes and sets sub-configurations along
            for name, value in original.__dict__.items():
                config.__dict__[name] = self.rebind(value)
            config.__dict__.update(_TWIN_CONFIG, _attn_implementation_internal=ATTENTION)
        return self.configs[id(original)]

    def _partial(self, original: partial) -> partial:
        function = self.rebind(original.func)
        args, keywords = self.rebind(original.args), self.rebind(original.keywords)
        if function is original.func and args is original.args and keywords is original.keywords:
            return original
        copy = partial(function, *args, **keywords)
        copy.__dict__.update({name: self.rebind(item) for name, item in original.__dict__.items()})
        return copy

    def _function(self, original: types.FunctionType) -> Callable:
        compiled = original.__dict__.get("_torchdynamo_orig_callable")
        if compiled is not None:
            return self.rebind(compiled)
        if not original.__closure__ or id(original) in self._functions:
            return self._functions.get(id(original), original)
        # a function may be held by its own closure: it stands for itself meanwhile
        self._functions[id(original)] = original
        held = [_cell_content(cell) for cell in original.__closure__]
        items = [self.rebind(item) for item in held]
        if not all(map(is_, items, held)):
            cells = tuple(
                cell if new is old else types.CellType(new)
                for cell, new, old in zip(original.__closure__, items, held, strict=True)
            )
            copy = types.FunctionType(
                original.__code__,
                original.__globals__,
                original.__name__,
                original.__defaults__,
                cells,
            )
            copy.__kwdefaults__ = original.__kwdefaults__
            copy.__dict__.update(original.__dict__)
            self._functions[id(original)] = copy
        return self._functions[id(original)]


def _unwrapped_modules(root: nn.Module) -> Iterator[nn.Module]:
    """Every module once, in the order of the tree; compiled wrappers are passed through."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        module = unwrap(waiting.pop())
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            waiting.extend(child for child in module._modules.values() if child is not None)


def _cell_content(cell: types.CellType) -> Any:
    """What a closure's cell holds; None while it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def is_dynamic_rope(module: nn.Module) -> bool:
    """Whether a rotary embedding changes its frequencies with the positions it is given."""
    kinds = module.__dict__.get("rope_type")
    kinds = kinds.values() if isinstance(kinds, dict) else (kinds,)
    return any(
        isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds
    )


def _stable_values(module: nn.Module) -> list[Any]:
    return [value for name, value in module.__dict__.items() if name not in _UNSTABLE]


def _record(module: nn.Module) -> _Record:
    # weights are replaced without the module meaning anything else
    weights = (module._parameters, module._buffers)
    values = tuple(_stable_values(module))
    contents = tuple(
        (value, tuple(_items(value)))
        for value in values
        if isinstance(value, dict | list) and not any(value is own for own in weights)
    )
    return _Record(module, values, contents)


def _items(holder: dict | list) -> list[Any]:
    items = holder.values() if isinstance(holder, dict) else holder
    return [item for item in items if not _is_gradient_hook(item)]


def _is_gradient_hook(item: Any) -> bool:
    return getattr(item, "__name__", None) in _GRADIENT_HOOKS


def _is_same(now: Collection[Any], before: Collection[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))
