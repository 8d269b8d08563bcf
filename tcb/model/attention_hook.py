"""Calls a model on one packed batch, and passes its attention to whoever carries the batch out.

transformers' attention interface is the way in: the twin's configurations name the function that is
registered here, and one keyword takes the batch through the model to it. Which pages are read or
written, and which models can be called so, is not known here.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION = "tcb_paged"
# set on the attention modules of a twin: the number under which a layer calls `attend`
LAYER = "_tcb_layer"


class Batch(Protocol):
    """What goes through the model as the keyword `tcb_batch`."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Attention of one layer for all packed tokens, their keys and values stored on the way.

        layer   position of the layer among those that call attention, in the order of the calls
        query   [tokens, heads, dim]    key, value  [tokens, kv_heads, dim | value_dim]
        sinks   [heads] or None         returns     [tokens, heads, value_dim]

        The tensors are views of the model's own, with any strides.
        """


def register() -> None:
    """Make our attention known to transformers; again and again is as good as once.

    No mask function goes with it: models then build no mask.
    """
    AttentionInterface.register(ATTENTION, _attention)


def call_model(
    twin: nn.Module,
    input_ids: Tensor,
    position_ids: Tensor,
    sample_index: Tensor,
    batch: object,
    *,
    keeps_logits: bool = True,
) -> Tensor:
    """Logits [samples, vocabulary] at the packed tokens that `sample_index` names.

    input_ids, position_ids [tokens] and sample_index [samples] are int64 on the twin's device.
    keeps_logits: the model's forward takes `logits_to_keep`; without it, logits of all tokens are
    computed and the wanted ones taken. Runs `batch.attend` once a layer; no gradients, inference
    tensors or autocast, whatever the caller's thread is set to. Raises ValueError where the logits
    are of another shape: no causal language model.
    """
    device = input_ids.device.type
    tensors = input_ids, position_ids, sample_index
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device, enabled=False):
        return forward(twin, *tensors, batch, keeps_logits=keeps_logits)


def forward(
    twin: nn.Module,
    input_ids: Tensor,
    position_ids: Tensor,
    sample_index: Tensor,
    batch: object,
    *,
    keeps_logits: bool,
) -> Tensor:
    """What `call_model` does, in the modes that the thread is set to."""
    keep = {"logits_to_keep": sample_index} if keeps_logits else {}
    output = twin(
        input_ids=input_ids[None],
        position_ids=position_ids[None],
        use_cache=False,
        tcb_batch=batch,
        **keep,
    )
    logits = output[0] if isinstance(output, tuple) else output.logits
    rows = sample_index.shape[0] if keeps_logits else input_ids.shape[0]
    if logits.dim() != 3 or logits.shape[1] != rows:
        raise ValueError(f"logits are {list(logits.shape)}; accepted: [1, {rows}, vocabulary]")
    return logits[0] if keeps_logits else logits[0, sample_index]


def pack(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[1, heads, tokens, dim] as [tokens, heads, dim], views."""
    return query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    tcb_batch: Batch | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature. Window, softcap and scale were read when the model was
    probed; sinks are weights and are taken from the call.
    """
    if tcb_batch is None:
        raise RuntimeError(
            f"{type(module).__name__} was called without a batch: the model was not called through "
            "call_model, or it drops keywords on their way to attention"
        )
    layer: int = getattr(module, LAYER)
    # inside a forward that autocasts, rotated queries and keys are wider than what attention takes
    query, key = query.to(value.dtype), key.to(value.dtype)
    return tcb_batch.attend(layer, *pack(query, key, value), s_aux)[None], None
