"""Records what a model's forward pass does around attention: calls, masks, position tables.

While a twin names RECORD as its attention, every layer's call is kept with all that came with it,
every mask carries the rule it stands for, and each token attends to itself only. Whether a model
can be served is not judged here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface

from tcb.model.attention_hook import pack
from tcb.model.parallel import local_part

RECORD = "tcb_record"
# on a mask that transformers made: its rule (batch, head, query position, key position) -> visible
RULE = "tcb_rule"


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


class Recording(TorchFunctionMode):
    """What one forward pass of a model shows. It goes through the model as `tcb_batch`.

    calls        in their order
    table_ends   for every table that is read by position, the first position it lacks; noted while
                 the recording is entered
    logits       [tokens, vocabulary], for whoever ran the pass to set

    A table is an embedding, or a parameter or buffer that is indexed; it is read by position where
    its indices are consecutive. So token ids and the logits asked for must not be.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.calls: list[Call] = []
        self.table_ends: list[int] = []
        self.logits = torch.empty(0)
        weights = (*model.parameters(), *model.buffers())
        self._addresses = {weight.data_ptr() for weight in weights if not weight.is_meta}

    def __torch_function__(
        self,
        func: Callable,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is functional.embedding:
            self._note(args[1], args[0])
        elif func is Tensor.__getitem__ and args[0].data_ptr() in self._addresses:
            self._note(args[0], args[1][0] if isinstance(args[1], tuple) else args[1])
        return func(*args, **(kwargs or {}))

    def _note(self, table: Tensor, index: Any) -> None:
        if not isinstance(index, Tensor) or index.dtype is not torch.int64 or index.numel() < 2:
            return
        index = local_part(index).flatten().tolist()
        if index == list(range(index[0], index[0] + len(index))):
            self.table_ends.append(table.shape[0] - index[0])


def register_recording() -> None:
    """Make RECORD known to transformers as an attention and as a maker of masks."""
    AttentionInterface.register(RECORD, _record_attention)
    AttentionMaskInterface.register(RECORD, _record_mask)


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
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor:
    """A mask that carries the rule it stands for."""
    mask = torch.ones((batch_size, 1, q_length, kv_length), dtype=torch.bool, device=device)
    mask.__dict__[RULE] = mask_function
    return mask
