"""Learns from two tiny forward passes how a model attends, and refuses by name what cannot be served.

During a probe the twin names recording functions for attention and masks, so that every layer shows
its window, scale and shapes, and every mask shows what it lets a token see. It does not know pages,
batches or requests.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface

from tcb.device.attention_hook import ATTENTION, LAYER, call_model, pack
from tcb.device.model_twin import is_dynamic_rope, set_attention, unwrap
from tcb.planning.groups import Layer

_PROBE = "tcb_probe"
_TOKENS = 6
_SERVED_LAYERS = ("full_attention", "sliding_attention")
# keywords on the way to attention that change nothing for one packed batch without dropout
_HARMLESS = frozenset(
    {
        "dropout",
        "position_ids",
        "position_embeddings",
        "use_cache",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    }
)
# far beyond any chunk or window: what a full layer must still see from here is position 0
_FAR = 1 << 30


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """How a model attends; the tuples have one entry a layer, in the order of their calls.

    layers          window and KV shape; `layer` is the number that `attend` is called with
    query_heads     heads of the query
    scales          factor on the products of query and key
    softcaps        c of c * tanh(scores / c), or None
    has_sinks       whether the layer passes sinks
    keeps_logits    forward takes `logits_to_keep` as a tensor of indices
    vocab_size      width of the logits
    num_embeddings  rows of the input embedding: a prompt's ids are below
    max_positions   positions from which on the model has no embedding, or rotates all of a batch
                    by its longest sequence; None: no such bound
    dtype, device   of keys and values
    """

    layers: tuple[Layer, ...]
    query_heads: tuple[int, ...]
    scales: tuple[float, ...]
    softcaps: tuple[float | None, ...]
    has_sinks: tuple[bool, ...]
    keeps_logits: bool
    vocab_size: int
    num_embeddings: int
    max_positions: int | None
    dtype: torch.dtype
    device: torch.device


def probe(model: nn.Module, twin: nn.Module) -> ModelLayers:
    """How `model` attends, read from `twin`; its attention modules are numbered on the way.

    Raises ValueError naming the model and the reason if it cannot be served: no causal language
    model, attention outside transformers' interface, other layers that pass tokens to each other,
    attention that is neither full nor sliding, keywords that would be ignored.
    """
    name = type(unwrap(model)).__name__
    keeps_logits = _check_forward(name, twin)
    _register()
    set_attention(twin, _PROBE)
    try:
        first, second, max_positions = _record_twice(name, twin, keeps_logits)
    finally:
        set_attention(twin, ATTENTION)
    _check_calls(name, first)
    _check_layer_types(name, twin)
    _check_no_mixing(name, first, second)
    for number, call in enumerate(first.calls):
        call.module.__dict__[LAYER] = number
    return _describe(first, keeps_logits, twin, max_positions)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of attention: packed tensors, and everything else that came with them."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: dict[str, Any]

    @property
    def window(self) -> int | None:
        return self.options.get("sliding_window")


@dataclass(slots=True)
class _Recording:
    """What one forward pass showed."""

    calls: list[_Call] = field(default_factory=list)
    logits: Tensor | None = None


def _refuse(name: str, reason: str, cause: Exception | None = None) -> NoReturn:
    raise ValueError(f"{name} cannot be served: {reason}") from cause


def _register() -> None:
    AttentionInterface.register(_PROBE, _record_attention)
    AttentionMaskInterface.register(_PROBE, _record_mask)


def _record_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    tcb_batch: _Recording | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Every token sees itself only: its value, once for each query head."""
    if tcb_batch is None:
        raise TypeError(
            f"{type(module).__name__} got no keyword tcb_batch: it is dropped on the way"
        )
    call = _Call(module, pack(query), pack(key), pack(value), attention_mask, options)
    tcb_batch.calls.append(call)
    if call.value.shape[0] != call.query.shape[0]:
        raise TypeError(
            f"{type(module).__name__} attends from {call.query.shape[0]} tokens to"
            f" {call.value.shape[0]}: cross-attention"
        )
    return call.value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)[None], None


def _record_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable,
    device: torch.device = "cpu",
    **_: Any,
) -> Tensor:
    """A mask that carries the rule it stands for."""
    mask = torch.ones((batch_size, 1, q_length, kv_length), dtype=torch.bool, device=device)
    mask.tcb_rule = mask_function
    return mask


class _PositionTables(TorchFunctionMode):
    """Notes how many positions the embedding tables have that are read by position."""

    def __init__(self):
        super().__init__()
        self.limits: list[int] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is functional.embedding:
            index, table = args[0].flatten(), args[1]
            start = int(index[0]) if index.numel() else 0
            if index.tolist() == list(range(start, start + _TOKENS)):
                self.limits.append(table.shape[0] - start)
        return func(*args, **(kwargs or {}))


def _check_forward(name: str, twin: nn.Module) -> bool:
    """Refuse what the signatures already show; whether forward takes `logits_to_keep`."""
    config = getattr(twin, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        _refuse(name, "it is an encoder-decoder model")
    adapter = getattr(twin, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        _refuse(name, f"its adapter {type(adapter).__name__} puts virtual tokens before the prompt")
    inner = twin.get_base_model() if hasattr(twin, "get_base_model") else twin
    parameters = inspect.signature(type(inner).forward).parameters
    if not any(item.kind is item.VAR_KEYWORD for item in parameters.values()):
        _refuse(name, "its forward takes no further keywords, so the batch cannot reach attention")
    return "logits_to_keep" in parameters


def _record_twice(
    name: str, twin: nn.Module, keeps_logits: bool
) -> tuple[_Recording, _Recording, int | None]:
    """Two passes that differ in the first token; the second asks for some logits, out of order."""
    embeddings = twin.get_input_embeddings().weight
    device, rows = embeddings.device, embeddings.shape[0]
    positions = torch.arange(_TOKENS, device=device)
    everything = torch.arange(_TOKENS, device=device)
    recordings = []
    tables = _PositionTables()
    for first, wanted in ((1, everything), (2, everything.flip(0))):
        # not a run of consecutive ids, which would look like positions
        ids = (torch.arange(_TOKENS, device=device) * 3 + 1) % rows
        ids[0] = first % rows
        recording = _Recording()
        try:
            with tables:
                recording.logits = call_model(
                    twin, ids, positions, wanted, recording, keeps_logits=keeps_logits
                )
        except (TypeError, ValueError, AttributeError, IndexError, NotImplementedError) as error:
            if not recording.calls:
                _refuse(
                    name, f"it does not call transformers' attention interface ({error})", error
                )
            _refuse(name, f"its forward failed on packed tokens: {error}", error)
        recordings.append(recording)
    limits = [*tables.limits, *_rope_limits(twin)]
    return recordings[0], recordings[1], min(limits, default=None)


def _rope_limits(twin: nn.Module) -> list[int]:
    """Lengths beyond which a rotary embedding chooses its frequencies by the longest sequence."""
    limits = []
    for module in filter(is_dynamic_rope, twin.modules()):
        parameters = module.config.rope_parameters
        nested = [item for item in parameters.values() if isinstance(item, dict)]
        limits += [
            item.get("original_max_position_embeddings") or module.original_max_seq_len
            for item in nested or [parameters]
        ]
    return limits


def _check_calls(name: str, recording: _Recording) -> None:
    if not recording.calls:
        _refuse(name, "it does not call transformers' attention interface")
    seen = set()
    for number, call in enumerate(recording.calls):
        where = f"attention call {number} ({type(call.module).__name__})"
        if id(call.module) in seen:
            _refuse(name, f"{where} is of a module that was called before")
        seen.add(id(call.module))
        _check_options(name, where, call)
        if reason := _mask_differs(call):
            _refuse(name, f"{where} {reason}")
    kinds = {(call.value.dtype, call.value.device) for call in recording.calls}
    kinds |= {(call.key.dtype, call.key.device) for call in recording.calls}
    if len(kinds) > 1:
        _refuse(
            name, f"its keys and values are of several dtypes or devices: {sorted(map(str, kinds))}"
        )


def _check_options(name: str, where: str, call: _Call) -> None:
    options = dict(call.options)
    causal = options.pop("is_causal", None)
    if not (getattr(call.module, "is_causal", True) if causal is None else causal):
        _refuse(name, f"{where} is not causal")
    for known in ("scaling", "sliding_window", "softcap", "s_aux"):
        options.pop(known, None)
    for option, value in options.items():
        if option not in _HARMLESS and value is not None and value is not False:
            _refuse(name, f"{where} passes {option}, which is not supported")


def _mask_differs(call: _Call) -> str | None:
    """What is wrong with a layer's mask: it must show the causal window that the layer states."""
    if call.mask is None:
        return "states a window, but has no mask" if call.window is not None else None
    rule = getattr(call.mask, "tcb_rule", None)
    if rule is None:
        return "has a mask of the model's own making"
    window = _FAR if call.window is None else call.window
    at = window + 5 if call.window else _FAR
    key = torch.tensor([0, at - window, at - window + 1, at - 1, at, at + 1])
    expected = (key <= at) & (key > at - window) if call.window else key <= at
    zero = torch.zeros_like(key)
    try:
        visible = rule(zero, zero, torch.full_like(key, at), key)
    except IndexError:
        return "has a mask that depends on more than positions"
    if not torch.equal(visible.cpu().expand_as(expected), expected):
        stated = "full" if call.window is None else f"a window of {window}"
        return (
            f"states {stated} attention, but its mask shows something else (a chunk, or both ways)"
        )
    return None


def _check_layer_types(name: str, twin: nn.Module) -> None:
    config = twin.config
    config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(_SERVED_LAYERS))
    if others:
        _refuse(name, f"its layer types {others} are not full or sliding attention")


def _check_no_mixing(name: str, first: _Recording, second: _Recording) -> None:
    """Attention apart, no token may depend on another: the second pass changed the first one only.

    The tolerance is the square root of the dtype's epsilon: rounding, should kernels differ, is far
    below it and another token's part far above.
    """
    pairs = [(first.logits[1:], second.logits.flip(0)[1:])]
    for one, two in zip(first.calls, second.calls, strict=True):
        pairs += [(one.query[1:], two.query[1:]), (one.key[1:], two.key[1:])]
        pairs += [(one.value[1:], two.value[1:])]
    for one, two in pairs:
        tolerance = torch.finfo(one.dtype).eps ** 0.5 * float(one.abs().max())
        if not float((one - two).abs().max()) <= tolerance:
            _refuse(
                name,
                "its tokens reach each other outside attention (convolution, state space, "
                "linear attention), or its logits cannot be asked for by index",
            )


def _describe(
    recording: _Recording, keeps_logits: bool, twin: nn.Module, max_positions: int | None
) -> ModelLayers:
    calls = recording.calls
    return ModelLayers(
        layers=tuple(
            Layer(
                layer=number,
                window=call.window,
                kv_heads=call.key.shape[1],
                dim=call.key.shape[2],
                value_dim=call.value.shape[2],
            )
            for number, call in enumerate(calls)
        ),
        query_heads=tuple(call.query.shape[1] for call in calls),
        scales=tuple(_scale(call) for call in calls),
        softcaps=tuple(call.options.get("softcap") for call in calls),
        has_sinks=tuple(call.options.get("s_aux") is not None for call in calls),
        keeps_logits=keeps_logits,
        vocab_size=recording.logits.shape[-1],
        num_embeddings=twin.get_input_embeddings().weight.shape[0],
        max_positions=max_positions,
        dtype=calls[0].key.dtype,
        device=calls[0].key.device,
    )


def _scale(call: _Call) -> float:
    """As stated, or the usual one over the root of the dimension."""
    scale = call.options.get("scaling")
    return call.query.shape[2] ** -0.5 if scale is None else float(scale)
