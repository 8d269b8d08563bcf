"""Runs packed batches on the model: upload, block moves, forward pass, sampling."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tcb.device.attention import PagedBatch, paged_layers
from tcb.device.buffers import BatchTensors, Buffers
from tcb.device.compiled import compiled_calls
from tcb.device.facts import can_be_deterministic
from tcb.device.flight import InFlightBatch, send_home
from tcb.device.kv_cache import KVCache
from tcb.device.offload import HostBlocks
from tcb.device.ranks import Ranks
from tcb.kernels import copy_blocks, sample
from tcb.model.attention_hook import call_model
from tcb.model.prepared import Prepared
from tcb.options.processors import Histories, apply_histories
from tcb.planning.groups import LayerGroup
from tcb.planning.limits import Limits
from tcb.planning.packing import PackedBatch


class Runner:
    """The model, its cache and its static buffers. One thread at a time calls `launch`; it keeps
    launch order.

    prepared   the model, exchanged by whoever finds it changed, for one of the same layers
    """

    def __init__(
        self,
        prepared: Prepared,
        groups: Sequence[LayerGroup],
        columns: Sequence[int],
        limits: Limits,
        ranks: Ranks,
    ):
        self.prepared, self._limits, self._ranks, layers = prepared, limits, ranks, prepared.layers
        dtype, device = layers.dtype, layers.device
        self._compiled = compiled_calls(limits.compilations)
        with torch.inference_mode(False):
            self.cache = KVCache(groups, limits.page_size, limits.num_blocks, dtype, device)
            self.host = HostBlocks(limits.host_blocks, self.cache.pool)
            self.buffers = Buffers(groups, columns, limits.page_size, limits.max_requests, device)
            self._layers = paged_layers(self.cache, groups, layers)
            self._deterministic = limits.deterministic and can_be_deterministic(self.cache.pool)

    def launch(self, packed: PackedBatch, histories: Histories) -> InFlightBatch:
        """Start one batch on the device, behind those launched before. Writes cache, host blocks
        and buffers.
        """
        with torch.inference_mode(False), torch.no_grad():
            self.host.save(packed.offload)
            self.host.load(packed.restore)
            # one new token is a chunk too where bits must not depend on the batch
            batch = self.buffers.load(packed, 0 if self._deterministic else packed.num_decodes)
            if batch.copies:
                copy_blocks(self.cache.pool, *batch.copies)
            is_decoding = packed.num_decodes == batch.block_table[0].shape[0]
            call = self._compiled[is_decoding] or call_model
            logits = call(
                self.prepared.twin,
                batch.token_ids,
                batch.positions,
                batch.sample_index,
                PagedBatch(self._layers, batch, self._deterministic),
                keeps_logits=self.prepared.layers.keeps_logits,
            )
            return self._sample(logits, batch, histories)

    def _sample(self, logits: Tensor, batch: BatchTensors, histories: Histories) -> InFlightBatch:
        logits, errors = apply_histories(histories, logits)
        token, logprob = sample(
            logits,
            position=batch.positions[batch.sample_index],
            want_logprob=self._limits.return_logprobs,
            **self.buffers.sampling.of(batch.sample_row),
        )
        self._ranks.take_over(token, logprob)
        # a failed sample is -1; the row ends, but a batch may be launched before the host knows
        self.buffers.last_token[batch.sample_row] = token.clamp(min=0)
        return send_home(token, logprob, errors)
