"""Clones a model's tree of modules around the very same weights, so that the engine may call it its
own way while the original stays as it was.

A twin has its own modules, its own evaluation mode and its own configuration objects; parameters
and buffers are shared as dictionaries, so what is trained, moved, cast or replaced in the original
is seen by the twin. `copy.deepcopy` would not do: it copies weights that hang on an offloading
hook, and hooks that remember what they saw.
"""

import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import is_
from typing import Any, cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from tcb.model.attention_hook import ATTENTION, register

# on a model: what is kept there between calls, and is neither cloned nor a part of what it means
PREPARED, MANAGER = "_tcb_prepared", "_cached_continuous_batching_manager"
# on a twin: all its configurations, and what its original had of which it has its own
_CONFIGS, COPIED = "_tcb_configs", "_tcb_copied"
# configuration that a twin answers with, whatever the original says: plain outputs, nothing kept
TWIN_CONFIG = {
    "_output_attentions": False,
    "output_hidden_states": False,
    "return_dict": True,
    "use_cache": False,
}
_SHARED = ("_parameters", "_buffers", "_non_persistent_buffers_set")
_LEFT_OUT = ("_compiled_call_impl", PREPARED, MANAGER)
# hooks that come and go with gradient checkpointing, and have no part in a twin
_GRADIENT_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")
# endings of the names of a module's dictionaries of hooks
_HOOKS = ("_hooks", "_with_kwargs", "_always_called")


def twin(model: nn.Module) -> PreTrainedModel:
    """Clone `model`: shared parameters and buffers, own modules and configurations, `eval()`.

    Every configuration object of the clone names our attention function. Methods and hooks that
    were bound to modules of the original (accelerate, patched `forward`) are bound to the clone's;
    compiled wrappers are left out. Writes nothing to the original.
    """
    register()
    return _Cloner().clone(unwrap(model))


def set_attention(clone: nn.Module, name: str) -> None:
    """Let the configurations of a twin name another registered attention function."""
    for config in clone.__dict__[_CONFIGS]:
        config.__dict__["_attn_implementation_internal"] = name


def unwrap(model: nn.Module) -> nn.Module:
    """The module that `torch.compile` wrapped, or `model` itself."""
    while "dynamo_ctx" in model.__dict__ and "_orig_mod" in model._modules:
        model = cast(nn.Module, model._modules["_orig_mod"])
    return model


def plain_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside what was wrapped around it: `torch.compile`, PEFT, copies for
    data parallel training.

    Adapters that live in the layers stay. Raises ValueError for prompt learning, which does not
    live there, TypeError for what is no model, and AttributeError for one that is not of
    transformers.
    """
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise TypeError(f"model is a {kind}; accepted: a model, as `from_pretrained` returns it")
    inner: Any = unwrap(model)
    while isinstance(inner, nn.DataParallel | nn.parallel.DistributedDataParallel):
        inner = unwrap(inner.module)
    if hasattr(inner, "peft_config") and hasattr(inner, "get_base_model"):
        active = getattr(inner, "active_peft_config", None)
        if getattr(active, "is_prompt_learning", False):
            kind = type(active).__name__
            raise ValueError(f"peft_config is a {kind}; accepted: adapters that live in the layers")
        inner = unwrap(inner.get_base_model())
    for name in ("config", "device", "dtype"):
        if not hasattr(inner, name):
            raise AttributeError(f"a {type(inner).__name__} has no {name!r}, which models have")
    return inner


def modules_of(root: nn.Module) -> Iterator[nn.Module]:
    """Every module once, in the order of the tree; compiled wrappers are passed through."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        module = unwrap(waiting.pop())
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            waiting.extend(child for child in module._modules.values() if child is not None)


def is_dynamic_rope(module: nn.Module) -> bool:
    """Whether a rotary embedding changes its frequencies with the positions it is given."""
    kinds = module.__dict__.get("rope_type")
    kinds = kinds.values() if isinstance(kinds, dict) else (kinds,)
    return any(
        isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds
    )


def is_gradient_hook(item: Any) -> bool:
    """Whether gradient checkpointing put it there."""
    return getattr(item, "__name__", None) in _GRADIENT_HOOKS


class _Cloner:
    """Owns the correspondence of one original and one clone."""

    def __init__(self) -> None:
        self._modules: dict[int, nn.Module] = {}
        self._configs: dict[int, PreTrainedConfig] = {}
        self._functions: dict[int, Callable] = {}
        self._copied: list[dict | list | types.CellType] = []

    def clone(self, root: nn.Module) -> PreTrainedModel:
        """Two passes: empty modules first, so that references in any direction can be resolved."""
        originals = list(modules_of(root))
        for original in originals:
            self._modules[id(original)] = type(original).__new__(type(original))
        for original in originals:
            self._fill(original, self._modules[id(original)].__dict__)
        clone = self._modules[id(root)]
        clone.__dict__[_CONFIGS] = tuple(self._configs.values())
        clone.__dict__[COPIED] = tuple(self._copied)
        return cast(PreTrainedModel, clone)

    def _fill(self, original: nn.Module, state: dict[str, Any]) -> None:
        for name, value in original.__dict__.items():
            if name in _SHARED:
                state[name] = value
            elif name == "_modules" or (name.endswith(_HOOKS) and isinstance(value, dict)):
                # own dictionaries: what is added to the clone does not reach the original
                state[name] = type(value)(
                    (key, self._rebind(item))
                    for key, item in value.items()
                    if not is_gradient_hook(item)
                )
            elif name not in _LEFT_OUT:
                state[name] = self._rebind(value)
        state["training"] = False
        if "gradient_checkpointing" in state:
            state["gradient_checkpointing"] = False
        if is_dynamic_rope(original):
            # these write their frequencies in forward
            state["_buffers"] = {
                name: None if buffer is None else buffer.clone()
                for name, buffer in original._buffers.items()
            }

    def _rebind(self, value: Any) -> Any:
        """`value`, with modules and configurations of the original exchanged for the clone's.

        The same object is returned where nothing in it refers to the original.
        """
        if isinstance(value, nn.Module):
            return self._modules.get(id(unwrap(value)), value)
        if isinstance(value, PreTrainedConfig):
            return self._config(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if _is_callable_object(value):
            return self._callable(value)
        parts, assemble = _take_apart(value)
        new = [self._rebind(part) for part in parts]
        if all(map(is_, new, parts)):
            return value
        if isinstance(value, dict | list):
            self._copied.append(value)
        return assemble(*new)

    def _callable(self, original: Any) -> Any:
        """An object that wraps a bound method, as mixed precision does, around the clone's."""
        if id(original) not in self._functions:
            # it may be held by what it holds: it stands for itself meanwhile
            self._functions[id(original)] = original
            held = original.__dict__
            new = {name: self._rebind(item) for name, item in held.items()}
            if not all(map(is_, new.values(), held.values())):
                kind: Any = type(original)
                copy = kind.__new__(kind)
                copy.__dict__.update(new)
                self._functions[id(original)] = copy
                self._copied.append(held)
        return self._functions[id(original)]

    def _config(self, original: PreTrainedConfig) -> PreTrainedConfig:
        if id(original) not in self._configs:
            config = type(original).__new__(type(original))
            self._configs[id(original)] = config
            # past __setattr__, which renames attributes and sets sub-configurations along
            for name, value in original.__dict__.items():
                config.__dict__[name] = self._rebind(value)
            config.__dict__.update(TWIN_CONFIG, _attn_implementation_internal=ATTENTION)
        return self._configs[id(original)]

    def _function(self, original: types.FunctionType) -> Callable:
        compiled = original.__dict__.get("_torchdynamo_orig_callable")
        if compiled is not None:
            return self._rebind(compiled)
        if original.__closure__ and id(original) not in self._functions:
            # a function may be held by its own closure: it stands for itself meanwhile
            self._functions[id(original)] = original
            cells = tuple(self._cell(cell) for cell in original.__closure__)
            if not all(map(is_, cells, original.__closure__)):
                self._functions[id(original)] = _with_closure(original, cells)
        return self._functions.get(id(original), original)

    def _cell(self, original: types.CellType) -> types.CellType:
        """A closure's cell; the same one unless what it holds was exchanged."""
        held = cell_content(original)
        new = self._rebind(held)
        if new is held:
            return original
        self._copied.append(original)
        return types.CellType(new)


def _is_callable_object(value: Any) -> bool:
    """Whether a value is called by its class, and holds what it calls in its own attributes."""
    return (
        callable(value)
        and not isinstance(value, type | partial | types.MethodType)
        and type(getattr(value, "__dict__", None)) is dict
    )


def _take_apart(value: Any) -> tuple[Sequence[Any], Callable[..., Any]]:
    """The parts of a value that may refer to modules, and what makes its like of other parts."""
    if isinstance(value, types.MethodType):
        return (value.__func__, value.__self__), types.MethodType
    if isinstance(value, partial):
        return (value.func, value.args, value.keywords, value.__dict__), _new_partial
    if type(value) in (list, tuple):
        return value, lambda *items: type(value)(items)
    if type(value) is dict:
        return list(value.values()), lambda *items: dict(zip(value, items, strict=True))
    return (), type(value)


def _new_partial(function: Callable, args: tuple, keywords: dict, attributes: dict) -> partial:
    new = partial(function, *args, **keywords)
    new.__dict__.update(attributes)
    return new


def _with_closure(original: types.FunctionType, cells: tuple[types.CellType, ...]) -> Callable:
    """The same function over other cells."""
    code, scope = original.__code__, original.__globals__
    copy = types.FunctionType(code, scope, original.__name__, original.__defaults__, cells)
    copy.__kwdefaults__ = original.__kwdefaults__
    copy.__dict__.update(original.__dict__)
    return copy


def cell_content(cell: types.CellType) -> Any:
    """What a closure's cell holds; None while it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
