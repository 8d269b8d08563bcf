"""Learns from two tiny forward passes how a model attends, and refuses what cannot be served."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from tcb.model.attention_hook import ATTENTION, LAYER, call_model
from tcb.model.parallel import is_sharded
from tcb.model.recording import RECORD, RULE, Call, Recording, register_recording
from tcb.model.twin import is_dynamic_rope, set_attention, unwrap
from tcb.planning.groups import Layer

# tokens of a pass, and of each of the two sequences in the second one
_TOKENS, _LENGTH = 6, 3
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SERVED_LAYERS = ("full_attention", "sliding_attention")
# keywords on the way to attention that are read elsewhere, or change nothing for one packed batch
# without dropout
_KNOWN = frozenset(
    {
        "is_causal",
        "scaling",
        "sliding_window",
        "softcap",
        "s_aux",
        "dropout",
        "position_ids",
        "position_embeddings",
        "use_cache",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "logits_to_keep",
    }
)
# beyond any chunk: a full layer must still see position 0 from here
_FAR = 1 << 30


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """How a model attends; the tuples have one entry a layer, in the order of their calls.

    layers          window and KV shape; `layer` is the number that `attend` is called with
    scales          factor on the products of query and key
    softcaps        c of c * tanh(scores / c), or None. None too where the model attends with sdpa:
                    that has no softcap, and what `generate` gives counts (transformers before
                    5.24 ran such models so)
    keeps_logits    forward takes `logits_to_keep` as a tensor of indices
    vocab_size      width of the logits
    num_embeddings  rows of the input embedding: a prompt's ids are below
    max_positions   positions from which on the model has no embedding, or rotates all of a batch
                    by its longest sequence; None: no such bound
    dtype, device   of keys and values
    """

    layers: tuple[Layer, ...]
    scales: tuple[float, ...]
    softcaps: tuple[float | None, ...]
    keeps_logits: bool
    vocab_size: int
    num_embeddings: int
    max_positions: int | None
    dtype: torch.dtype
    device: torch.device


class _Refusal(Exception):
    """Why a model cannot be served."""


def probe(model: PreTrainedModel, twin: PreTrainedModel) -> ModelLayers:
    """How `model` attends, read from `twin`; its attention modules are numbered on the way.

    Raises ValueError naming the model and the reason if it cannot be served: no causal language
    model, attention outside transformers' interface, other layers that pass tokens to each other,
    attention that is neither full nor sliding, keywords that would be ignored.
    """
    original = unwrap(model)
    try:
        return _probe(twin, _text_config(original)._attn_implementation)
    except _Refusal as reason:
        name = type(original).__name__
        raise ValueError(f"{name} cannot be served: {reason}") from reason.__cause__


def _probe(twin: PreTrainedModel, implementation: str | None) -> ModelLayers:
    """As `probe`, for a model that attends with this implementation."""
    keeps_logits = _check_forward(twin)
    register_recording()
    set_attention(twin, RECORD)
    try:
        first, second = _record_twice(twin, keeps_logits)
    finally:
        set_attention(twin, ATTENTION)
    calls = first.calls
    windows = _check_calls(twin, calls)
    _check_layer_types(twin)
    _check_cache(twin, windows)
    _check_no_mixing(first, second)
    for number, call in enumerate(calls):
        call.module.__dict__[LAYER] = number
    softcaps = [None if implementation == "sdpa" else call.options.get("softcap") for call in calls]
    return ModelLayers(
        layers=tuple(
            Layer(number, window, call.key.shape[1], call.key.shape[2], call.value.shape[2])
            for number, (call, window) in enumerate(zip(calls, windows, strict=True))
        ),
        scales=tuple(_scale(call) for call in calls),
        softcaps=tuple(softcaps),
        keeps_logits=keeps_logits,
        vocab_size=first.logits.shape[-1],
        num_embeddings=_embeddings(twin).weight.shape[0],
        max_positions=min([*first.table_ends, *_rope_bounds(twin)], default=None),
        dtype=calls[0].value.dtype,
        device=calls[0].value.device,
    )


def _embeddings(twin: PreTrainedModel) -> Any:
    """The module that holds the table of input embeddings."""
    return twin.get_input_embeddings()


def _check_forward(twin: PreTrainedModel) -> bool:
    """Refuse what the signatures already show; whether forward takes `logits_to_keep`."""
    if getattr(twin.config, "is_encoder_decoder", False):
        raise _Refusal("it is an encoder-decoder model")
    if not hasattr(_embeddings(twin), "weight"):
        raise _Refusal("it has no single table of input embeddings")
    parameters = inspect.signature(type(twin).forward).parameters
    if not any(item.kind is item.VAR_KEYWORD for item in parameters.values()):
        raise _Refusal("its forward takes no further keywords, so no batch reaches its attention")
    return "logits_to_keep" in parameters


def _record_twice(twin: PreTrainedModel, keeps_logits: bool) -> tuple[Recording, Recording]:
    """Two passes: one sequence, and two that lie side by side, as in a batch.

    The second pass has the first three tokens of the first one twice, each time from position 0 on,
    with another token in the place of the very first; and asks for logits in another order.
    """
    weight = _embeddings(twin).weight
    # weights that an offloading hook brings are on no device yet
    device = _embeddings(twin)._hf_hook.execution_device if weight.is_meta else weight.device
    places = torch.arange(_TOKENS, device=device)
    *ids, other = _tokens_to_try(weight, _TOKENS + 1)
    again = places % _LENGTH
    first_ids = torch.tensor(ids, device=device)
    other_ids = torch.where(places == 0, other, first_ids[again])
    first, second = Recording(twin), Recording(twin)
    for recording, tokens, positions, wanted in (
        (first, first_ids, places, places.flip(0)),
        (second, other_ids, again, places.roll(2)),
    ):
        try:
            with recording:
                logits = call_model(
                    twin, tokens, positions, wanted, recording, keeps_logits=keeps_logits
                )
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise _Refusal(f"its forward failed on packed tokens: {error}") from error
        recording.logits = logits[wanted.argsort()]
    return first, second


def _tokens_to_try(weight: Tensor, count: int) -> list[int]:
    """Ids that are not consecutive, as positions are, with finite embeddings where there are."""
    ids = [(3 * place + 1) % weight.shape[0] for place in range(count)]
    # rows of a table that is split over ranks are not looked at
    if weight.is_meta or is_sharded(weight) or weight[ids].isfinite().all():
        return ids
    finite = weight.isfinite().all(1).nonzero()[:, 0].tolist()
    return finite[:: max(1, len(finite) // count)][:count] if len(finite) >= count else ids


def _check_calls(twin: PreTrainedModel, calls: Sequence[Call]) -> list[int | None]:
    """Refuse calls that cannot be served; the windows of the others."""
    if not calls:
        raise _Refusal("it does not call transformers' attention interface")
    configured = getattr(_text_config(twin), "sliding_window", None)
    seen: set[int] = set()
    windows = []
    for number, call in enumerate(calls):
        try:
            if id(call.module) in seen:
                raise _Refusal("is of a module that was called before")
            _check_options(call)
            windows.append(_read_window(call, configured))
        except _Refusal as reason:
            where = f"attention call {number} ({type(call.module).__name__})"
            raise _Refusal(f"{where} {reason}") from reason.__cause__
        seen.add(id(call.module))
    kinds = {(str(call.value.dtype), str(call.value.device)) for call in calls}
    if len(kinds) > 1:
        raise _Refusal(f"its keys and values are of several dtypes or devices: {sorted(kinds)}")
    if calls[0].value.dtype not in _DTYPES:
        raise _Refusal(
            f"its keys and values are {calls[0].value.dtype}; accepted: float32, float16, bfloat16"
        )
    return windows


def _check_options(call: Call) -> None:
    causal = call.options.get("is_causal")
    if not (getattr(call.module, "is_causal", True) if causal is None else causal):
        raise _Refusal("is not causal")
    if call.options.get("s_aux") is None and getattr(call.module, "sinks", None) is not None:
        raise _Refusal("has sinks, but does not pass them")
    for option, value in call.options.items():
        if option not in _KNOWN and value is not None and value is not False:
            raise _Refusal(f"passes {option}, which is not supported")


def _read_window(call: Call, configured: int | None) -> int | None:
    """The window that a layer states, which its mask must show; a mask may also show the configured
    one to a layer that states none.
    """
    stated = call.options.get("sliding_window")
    if call.mask is None:
        if stated is None:
            return None
        raise _Refusal("states a window, but has no mask")
    rule: Callable | None = getattr(call.mask, RULE, None)
    if rule is None:
        raise _Refusal("has a mask of the model's own making")
    for window in (None, configured) if stated is None else (stated,):
        if _shows(rule, window):
            return window
    kind = "full attention" if stated is None else f"a window of {stated}"
    raise _Refusal(
        f"states {kind}, but its mask shows something else, such as chunks or both directions"
    )


def _shows(rule: Callable, window: int | None) -> bool:
    """Whether a mask is causal and, around its far end, shows just this window."""
    at = _FAR if window is None else window + 5
    start = 0 if window is None else at - window + 1
    key = torch.tensor([0, start - 1, start, at - 1, at, at + 1]).clamp(min=0)
    zero = torch.zeros_like(key)
    try:
        visible = rule(zero, zero, torch.full_like(key, at), key)
    except IndexError as error:
        raise _Refusal("has a mask that depends on more than positions") from error
    return torch.equal(visible.cpu().expand_as(key), (key >= start) & (key <= at))


def _check_cache(twin: PreTrainedModel, windows: Sequence[int | None]) -> None:
    """Where `generate` keeps the last tokens of a layer only, they must be those of its window."""
    kept = DynamicCache(config=twin.config).layers
    if len(kept) != len(windows):
        return
    for number, (layer, window) in enumerate(zip(kept, windows, strict=True)):
        # layers without keys and values of their own have no such attribute
        last = getattr(layer, "sliding_window", None)
        if getattr(layer, "is_sliding", False) and last != window:
            raise _Refusal(
                f"attention call {number} has window {window}, but `generate` keeps"
                f" {last} tokens for it"
            )


def _check_layer_types(twin: PreTrainedModel) -> None:
    kinds = getattr(_text_config(twin), "layer_types", None) or ()
    others = sorted(set(kinds) - set(_SERVED_LAYERS))
    if others:
        raise _Refusal(f"its layer types {others} are not full or sliding attention")


def _check_no_mixing(first: Recording, second: Recording) -> None:
    """Attention apart, a token may depend on its own id and position only, whatever lies beside it.

    The tolerance is the square root of the dtype's epsilon: rounding, should kernels differ, is far
    below it and another token's part far above.
    """
    pairs = [(first.logits, second.logits)]
    for one, two in zip(first.calls, second.calls, strict=True):
        pairs += [(one.query, two.query), (one.key, two.key), (one.value, two.value)]
    if not all(one.isfinite().any() for one, _ in pairs):
        raise _Refusal("what it computes is NaN or infinite for every token that was tried")
    if not all(_agree(one[1:_LENGTH], two[1:_LENGTH]) for one, two in pairs):
        raise _Refusal(
            "its tokens reach each other outside attention (convolution, state space, linear"
            " attention, quantization by the range of a whole batch), or its logits cannot be asked"
            " for by index"
        )
    if not all(_agree(one[:_LENGTH], two[_LENGTH:]) for one, two in pairs):
        raise _Refusal(
            "it takes places, lengths or masks from the tokens that it is called with, not from"
            " position_ids"
        )


def _agree(one: Tensor, two: Tensor) -> bool:
    """Whether two are equal but for rounding, where either is finite."""
    finite = one.isfinite()
    if not torch.equal(finite, two.isfinite()):
        return False
    one, two = one[finite], two[finite]
    if not one.numel():
        return True
    tolerance = torch.finfo(one.dtype).eps ** 0.5 * float(one.abs().max())
    return float((one - two).abs().max()) <= tolerance


def _scale(call: Call) -> float:
    """As stated, or the usual one over the root of the dimension."""
    scale = call.options.get("scaling")
    return call.query.shape[2] ** -0.5 if scale is None else float(scale)


def _rope_bounds(twin: PreTrainedModel) -> list[int]:
    """Lengths beyond which a rotary embedding chooses its frequencies by the longest sequence."""
    ropes: Iterable[Any] = filter(is_dynamic_rope, twin.modules())
    bounds: list[int] = []
    for rope in ropes:
        parameters = rope.config.rope_parameters
        nested = [item for item in parameters.values() if isinstance(item, dict)]
        bounds += [
            item.get("original_max_position_embeddings") or rope.original_max_seq_len
            for item in nested or [parameters]
        ]
    return bounds


def _text_config(model: Any) -> PreTrainedConfig:
    """The configuration of the language model, which may be a part of the whole one."""
    return model.config.get_text_config(decoder=True)
