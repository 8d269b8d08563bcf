"""What an attention layer sees of a batch: it stores its new keys and values, then reads its pages.

Every layer of a batch attends through one `PagedBatch`; what a layer attends with at every batch
lies ready in a `PagedLayer`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tcb.device.buffers import BatchTensors
from tcb.device.kv_cache import KVCache
from tcb.kernels import list_work, paged_attention, paged_decode, write_kv
from tcb.kernels.contract import WorkList
from tcb.model.probe import ModelLayers
from tcb.planning.groups import LayerGroup


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """How one layer attends, and where its keys and values lie.

    group    whose block table and slots it uses
    caches   of keys and of values, [blocks, page_size, kv_heads, dim | value_dim]
    options  window, softcap and scale, by their names
    """

    group: int
    caches: tuple[Tensor, Tensor]
    options: dict[str, Any]


def paged_layers(
    cache: KVCache, groups: Sequence[LayerGroup], layers: ModelLayers
) -> tuple[PagedLayer, ...]:
    """One entry a layer, in the order of their calls."""
    group_of = {layer: g for g, group in enumerate(groups) for layer in group.layers}
    return tuple(
        PagedLayer(
            group_of[layer.layer],
            (cache.key[layer.layer], cache.value[layer.layer]),
            {"window": layer.window, "softcap": softcap, "scale": scale},
        )
        for layer, softcap, scale in zip(layers.layers, layers.softcaps, layers.scales, strict=True)
    )


class PagedBatch:
    """One batch, as `call_model` takes it through the model.

    deterministic: attend by the kernel whose bits do not depend on the batch.
    """

    def __init__(self, layers: Sequence[PagedLayer], batch: BatchTensors, deterministic: bool):
        self._layers, self._batch, self._deterministic = layers, batch, deterministic
        self._work: dict[tuple[int, int], WorkList | None] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Attention of one layer for all packed tokens.

        query       [tokens, heads, dim]
        key, value  [tokens, kv_heads, dim | value_dim]     sinks  [heads] or None

        Returns [tokens, heads, value_dim]; writes the layer's cache.
        """
        paged, batch = self._layers[layer], self._batch
        table, n = batch.block_table[paged.group], batch.decode_end.shape[0]
        write_kv(key, value, *paged.caches, batch.slot[paged.group])
        out = query.new_empty((*query.shape[:2], value.shape[2]))
        if n:
            decodes = (query[:n], *paged.caches, table[:n], batch.decode_end)
            paged_decode(*decodes, sinks=sinks, out=out[:n], **paged.options)
        if n < table.shape[0]:
            query, key, value = query[n:], key[n:], value[n:]
            chunks = (query, key, value, *paged.caches, table[n:], *batch.chunks)
            paged_attention(
                *chunks,
                sinks=sinks,
                out=out[n:],
                deterministic=self._deterministic,
                work_list=self._list_work(paged, query, value),
                **paged.options,
            )
        return out

    def _list_work(self, layer: PagedLayer, query: Tensor, value: Tensor) -> WorkList | None:
        """The work list of the batch's chunks, made by the first layer of a group that asks."""
        place = layer.group, query.shape[1]
        if place not in self._work:
            window, deterministic = layer.options["window"], self._deterministic
            self._work[place] = list_work(
                query, value, *self._batch.chunks, window=window, deterministic=deterministic
            )
        return self._work[place]
