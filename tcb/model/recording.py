"""Records what a model's forward pass does around attention: calls, masks, position tables.

While a twin names RECORD as its attention, every layer's call is kept with all that came with it,
every mask carries the rule it stands for, and each token attends to itself only. Whether a model
can be served is not judged here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface

from tcb.model.attention_hook import pack

RECORD = "tcb_record"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of attention.

    query        [tokens, heads, dim]
    key, value   [tokens, kv_heads, dim | value_dim]
    mask         what the model passed as its mask
    options      all other keywords
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: dict[str, Any]


@dataclass(slots=True)
class Recording:
    """What one forward pass showed. It goes through the model as `tcb_batch`.

    calls        in their order
    logits       [tokens, vocabulary], set by whoever ran the pass
    table_ends   for every table that was read by position, the first position it lacks
    """

    calls: list[Call] = field(default_factory=list)
    logits: Tensor | None = None
    table_ends: list[int] = field(default_factory=list)


def register_recording() -> None:
    """Make RECORD known to transformers as an attention and as a maker of masks."""
    AttentionInterface.register(RECORD, _record_attention)
    AttentionMaskInterface.register(RECORD, _record_mask)


def mask_rule(call: Call) -> Callable | None:
    """The rule (batch, head, query position, key position) -> visible of a mask that transformers
    made; None for a mask of the model's own making.
    """
    return getattr(call.mask, "tcb_rule", None)


class PositionTables(TorchFunctionMode):
    """While active, notes the tables of a model that are read at consecutive indices: by position.

    Embeddings, and parameters or buffers that are indexed. Token ids and the logits asked for in a
    recorded pass must not be consecutive.
    """

    def __init__(self, model: nn.Module, recording: Recording):
        super().__init__()
        weights = (*model.parameters(), *model.buffers())
        self._addresses = {weight.data_ptr() for weight in weights if not weight.is_meta}
        self._recording = recording

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is functional.embedding:
            self._note(args[1], args[0])
        elif func is Tensor.__getitem__ and args[0].data_ptr() in self._addresses:
            self._note(args[0], args[1][0] if isinstance(args[1], tuple) else args[1])
        return func(*args, **(kwargs or {}))

    def _note(self, table: Tensor, index: Any) -> None:
        if not isinstance(index, Tensor) or index.dtype is not torch.int64 or index.numel() < 2:
            return
        index = index.flatten().tolist()
        if index == list(range(index[0], index[0] + len(index))):
            self._recording.table_ends.append(table.shape[0] - index[0])


def _record_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    tcb_batch: Recording | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Every token sees itself only: its value, once for each query head."""
    where = type(module).__name__
    if tcb_batch is None:
        raise TypeError(f"{where} got no batch: the keyword is dropped on its way to attention")
    call = Call(module, *pack(query, key, value), attention_mask, options)
    tcb_batch.calls.append(call)
    own, others = call.query.shape[0], call.value.shape[0]
    if own != others:
        raise TypeError(f"{where} attends from {own} tokens to {others}: cross-attention")
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
