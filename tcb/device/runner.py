"""Runs packed batches on the model: upload, block moves, forward pass, sampling, and the way home
of the tokens.

Knows nothing of requests or of why a batch is what it is.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tcb.device.buffers import BatchTensors, Buffers
from tcb.device.kv_cache import KVCache
from tcb.device.offload import HostBlocks, fork_blocks
from tcb.kernels import list_work, paged_attention, paged_decode, sample, write_kv
from tcb.kernels.dispatch import use_triton
from tcb.kernels.gpu.work_list import WorkList
from tcb.model.attention_hook import call_model
from tcb.model.probe import ModelLayers
from tcb.options.processors import apply_history
from tcb.planning.config import Limits
from tcb.planning.groups import LayerGroup
from tcb.planning.packing import PackedBatch

logger = logging.getLogger("ContinuousBatchingLogger")

# a sampled row's own logits processors and all its tokens so far, by the row's place among the
# samples
Histories = Mapping[int, tuple[Any, Sequence[int]]]


@dataclass(frozen=True, slots=True)
class InFlightBatch:
    """A launched batch. `land` waits for it and returns tokens and log-probabilities, one a
    sample.
    """

    token: Tensor
    logprob: Tensor | None
    errors: dict[int, str]
    event: Any

    def land(self) -> tuple[list[int], list[float] | None]:
        """Tokens (-1: the sample failed) and log-probabilities if they were asked for; the host
        waits here.
        """
        if self.event is not None:
            self.event.synchronize()
        return self.token.tolist(), None if self.logprob is None else self.logprob.tolist()


class Runner:
    """The model, its cache and its static buffers. One thread at a time calls `launch`; it keeps
    launch order.
    """

    def __init__(
        self,
        twin: nn.Module,
        layers: ModelLayers,
        groups: Sequence[LayerGroup],
        columns: Sequence[int],
        limits: Limits,
    ):
        self.twin, self._layers, self._limits = twin, layers, limits
        self._group_of = {layer: g for g, group in enumerate(groups) for layer in group.layers}
        with torch.inference_mode(False):
            self.cache = KVCache(
                groups, limits.page_size, limits.num_blocks, layers.dtype, layers.device
            )
            self._deterministic = limits.deterministic and _can_be_deterministic(self.cache.pool)
            self.host = HostBlocks(limits.host_blocks, self.cache.pool)
            self.buffers = Buffers(
                groups, columns, limits.page_size, limits.max_requests, layers.device
            )

    def launch(self, packed: PackedBatch, histories: Histories) -> InFlightBatch:
        """Start one batch on the device, behind those launched before. Writes cache, host blocks
        and buffers.
        """
        with torch.inference_mode(False), torch.no_grad():
            self.host.save(packed.offload)
            self.host.load(packed.restore)
            fork_blocks(self.cache.pool, packed.copies)
            tensors = self.buffers.load(packed)
            batch = PagedBatch(
                self.cache, self._layers, self._group_of, tensors, self._deterministic
            )
            logits = call_model(
                self.twin,
                tensors.token_ids,
                tensors.positions,
                tensors.sample_index,
                batch,
                keeps_logits=self._layers.keeps_logits,
            )
            return self._sample(logits, tensors, histories)

    def _sample(self, logits: Tensor, tensors: BatchTensors, histories: Histories) -> InFlightBatch:
        errors: dict[int, str] = {}
        if histories:
            logits = _process(logits.float(), histories, errors)
        row = tensors.sample_row
        token, logprob = sample(
            logits,
            position=tensors.positions[tensors.sample_index],
            want_logprob=self._limits.return_logprobs,
            **self.buffers.sampling.of(row),
        )
        # a failed sample is -1; the row ends, but a batch may be launched before the host knows
        self.buffers.last_token[row] = token.clamp(min=0)
        return _send_home(token, logprob, errors)


class PagedBatch:
    """What the attention layers see of a batch: `attend` stores the new keys and values, then reads
    the pages.

    deterministic: sequences of one new token are attended to as chunks too, by the one kernel whose
    bits do not depend on the batch.
    """

    def __init__(
        self,
        cache: KVCache,
        layers: ModelLayers,
        group_of: Mapping[int, int],
        tensors: BatchTensors,
        deterministic: bool = False,
    ):
        self._cache, self._layers, self._group_of, self._batch = cache, layers, group_of, tensors
        self._deterministic = deterministic
        self._num_decodes = 0 if deterministic else tensors.num_decodes
        self._chunk_start = tensors.query_start if deterministic else tensors.chunk_start
        self._work: dict[tuple[int, int], WorkList | None] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Attention of one layer for all packed tokens.

        query       [tokens, heads, dim]
        key, value  [tokens, kv_heads, dim | value_dim]     sinks  [heads] or None

        Returns [tokens, heads, value_dim]; writes the layer's cache.
        """
        cache, batch, group = self._cache, self._batch, self._group_of[layer]
        key_cache, value_cache = cache.key[layer], cache.value[layer]
        dtype = query.dtype
        if dtype != key_cache.dtype:
            query, key, value = (part.to(key_cache.dtype) for part in (query, key, value))
        facts = {
            "window": self._layers.layers[layer].window,
            "softcap": self._layers.softcaps[layer],
            "scale": self._layers.scales[layer],
            "sinks": sinks,
        }
        write_kv(key, value, key_cache, value_cache, batch.slot[group])
        table, n = batch.block_table[group], self._num_decodes
        out = query.new_empty((query.shape[0], query.shape[1], value.shape[2]))
        if n:
            decode_out = out[:n]
            paged_decode(
                query[:n],
                key_cache,
                value_cache,
                table[:n],
                batch.decode_end,
                out=decode_out,
                **facts,
            )
        if n < table.shape[0]:
            query, key, value = query[n:], key[n:], value[n:]
            paged_attention(
                query,
                key,
                value,
                key_cache,
                value_cache,
                table[n:],
                self._chunk_start,
                batch.context_len[n:],
                out=out[n:],
                deterministic=self._deterministic,
                work_list=self._list_work(group, query, value, facts["window"]),
                **facts,
            )
        return out.to(dtype)

    def _list_work(
        self, group: int, query: Tensor, value: Tensor, window: int | None
    ) -> WorkList | None:
        """The work list of the batch's chunks, made by the first layer of a group that asks."""
        place = group, query.shape[1]
        if place not in self._work:
            lengths = self._chunk_start, self._batch.context_len[self._num_decodes :]
            self._work[place] = list_work(
                query, value, *lengths, window=window, deterministic=self._deterministic
            )
        return self._work[place]


def _can_be_deterministic(pool: Tensor) -> bool:
    """Whether the kernels, not torch operations, attend to what is in this pool; a no is logged."""
    if use_triton(pool):
        return True
    logger.warning(
        "deterministic has no effect: torch operations attend on a CPU, and their bits may depend "
        "on the batch"
    )
    return False


def _process(logits: Tensor, histories: Histories, errors: dict[int, str]) -> Tensor:
    """Run the rows' own processors. What one row's processor raises fails that row alone: its
    logits become NaN.
    """
    for place, (processors, tokens) in histories.items():
        try:
            logits[place] = apply_history(processors, tokens, logits[place])
        except Exception as error:
            logits[place] = float("nan")
            errors[place] = f"logits processor: {type(error).__name__}: {error}"
    return logits


def _send_home(token: Tensor, logprob: Tensor | None, errors: dict[int, str]) -> InFlightBatch:
    if token.device.type == "cpu":
        return InFlightBatch(token, logprob, errors, None)
    home = token.to("cpu", non_blocking=True)
    home_logprob = None if logprob is None else logprob.to("cpu", non_blocking=True)
    event = torch.get_device_module(token.device).Event()
    event.record()
    return InFlightBatch(home, home_logprob, errors, event)
