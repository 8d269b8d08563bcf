"""Who is timed on a workload: this package's kernels, torch's attention and FlashAttention-3.

A contender turns tensors into a call that returns [tokens, heads, dim], or raises `CannotRun` with
the reason. Comparators without pages get the keys laid out contiguously beforehand, for free. It
knows how each is called, and no clock.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.lib.attention import Tensors, Workload
from bench.lib.machine import side_stream
from tcb.kernels import list_work, paged_attention, paged_decode
from tcb.kernels.dispatch import is_interpreting

Call = Callable[[], Tensor]
# what torch's FlashAttention reads pages in; smaller ones are refused
_TORCH_PAGE = 256
flash_operation = torch.ops.aten._flash_attention_forward.default


class CannotRun(Exception):
    """A contender has no way to do a workload; the text says why."""


def tcb(workload: Workload, tensors: Tensors, chunk_options: dict[str, Any] | None = None) -> Call:
    """As the engine calls: `paged_decode` for single tokens, `paged_attention` for the chunks."""
    out = torch.empty_like(tensors.query)
    decodes = _decodes(workload, tensors, out)
    chunks = _chunks(workload, tensors, out, workload.num_decodes)

    def call() -> Tensor:
        if workload.num_decodes:
            decodes()
        if workload.num_chunks:
            chunks(**(chunk_options or {}))
        return out

    return call


def tcb_shared_list(workload: Workload, tensors: Tensors) -> Call:
    """As the layers of a group call behind the first: the list of tiles is made already."""
    if not workload.num_chunks:
        raise CannotRun("no chunks: nothing is listed")
    chunks = slice(workload.num_decodes, None)
    work_list = list_work(
        tensors.query[chunks],
        tensors.new_value[chunks],
        tensors.query_start[chunks] - workload.num_decodes,
        tensors.context_len[chunks],
        window=workload.window,
    )
    if work_list is None:
        raise CannotRun("torch operations take no list")
    return tcb(workload, tensors, chunk_options={"work_list": work_list})


def tcb_one_call(workload: Workload, tensors: Tensors) -> Call:
    """`paged_attention` alone for a mixed batch."""
    if not (workload.num_decodes and workload.num_chunks):
        raise CannotRun("the batch is not mixed: it is one call anyway")
    return _chunks(workload, tensors, torch.empty_like(tensors.query), 0)


def tcb_overlapped(workload: Workload, tensors: Tensors) -> Call:
    """As the engine calls, single tokens and chunks on two streams."""
    if not (workload.num_decodes and workload.num_chunks):
        raise CannotRun("the batch is not mixed: there is nothing to overlap")
    out = torch.empty_like(tensors.query)
    decodes = _decodes(workload, tensors, out)
    chunks = _chunks(workload, tensors, out, workload.num_decodes)

    def call() -> Tensor:
        with side_stream(out.device, chunks):
            decodes()
        return out

    return call


def tcb_batch_invariant(workload: Workload, tensors: Tensors) -> Call:
    """`paged_attention` with `deterministic=True` for all, as the engine calls it then."""
    if not takes_deterministic():
        raise CannotRun("torch operations are not `deterministic`")
    return partial(
        _chunks(workload, tensors, torch.empty_like(tensors.query), 0), deterministic=True
    )


def takes_deterministic() -> bool:
    """Whether bits can be asked for that do not depend on the batch; torch operations have none."""
    return torch.accelerator.is_available() or is_interpreting()


def torch_flash(workload: Workload, tensors: Tensors) -> Call:
    """torch's FlashAttention of packed sequences, over contiguous keys."""
    longest = max(workload.keys_seen(*pair) for pair in workload.sequences)
    contiguous = tensors.keys, tensors.values
    return _torch_flash(workload, tensors, *contiguous, tensors.key_start, longest)


def torch_flash_paged(workload: Workload, tensors: Tensors) -> Call:
    """The same over pages, where this torch's operation takes a block table."""
    if not {"block_table", "seqused_k"} <= flash_arguments():
        raise CannotRun(f"torch {torch.__version__}: no block table in its FlashAttention")
    if workload.page_size % _TORCH_PAGE:
        raise CannotRun(f"pages of {workload.page_size}: it reads multiples of {_TORCH_PAGE}")
    paged = {"block_table": _unrolled(workload, tensors), "seqused_k": tensors.total_len}
    pools = tensors.key_cache, tensors.value_cache
    key_start = torch.cat([tensors.query_start[:1], tensors.total_len.cumsum(0).int()])
    longest = max(context + new for context, new in workload.sequences)
    return _torch_flash(workload, tensors, *pools, key_start, longest, **paged)


def flash_arguments() -> set[str]:
    """Names of the arguments of torch's FlashAttention operation."""
    return {argument.name for argument in flash_operation._schema.arguments}


def sdpa(workload: Workload, tensors: Tensors, backend: SDPBackend | None = None) -> Call:
    """torch's dense attention over contiguous keys, by one backend or torch's own choice."""
    if not workload.uniform:
        raise CannotRun("dense batches only: sequences of different lengths")
    context, new = workload.sequences[0]
    if workload.window is not None and new > 1:
        raise CannotRun("no window but by a mask of all scores")
    if context and new > 1:
        raise CannotRun("its causal mask is aligned to the top left: no chunks behind a context")
    count = len(workload.sequences)

    def dense(tensor: Tensor) -> Tensor:
        return tensor.view(count, -1, *tensor.shape[1:]).transpose(1, 2)

    query, keys, values = (dense(part) for part in (tensors.query, tensors.keys, tensors.values))

    def call() -> Tensor:
        out = scaled_dot_product_attention(query, keys, values, is_causal=new > 1, enable_gqa=True)
        return out.transpose(1, 2).reshape(tensors.query.shape)

    if backend is None:
        return call

    def forced() -> Tensor:
        with sdpa_kernel([backend]):
            return call()

    return forced


def flash_attention_3(workload: Workload, tensors: Tensors) -> Call:
    """FlashAttention-3 over pages, if installed; chunks read their own keys from pages too."""
    try:
        interface = import_module("flash_attn_interface")
    except Exception as error:
        raise CannotRun(f"flash_attn_interface: {type(error).__name__}: {error}") from None
    window = (-1, -1) if workload.window is None else (workload.window - 1, 0)
    table = _unrolled(workload, tensors)
    attend = partial(
        interface.flash_attn_with_kvcache,
        tensors.query,
        tensors.key_cache,
        tensors.value_cache,
        cache_seqlens=tensors.total_len,
        page_table=table,
        cu_seqlens_q=tensors.query_start,
        max_seqlen_q=max(new for _, new in workload.sequences),
        causal=True,
        window_size=window,
    )

    def call() -> Tensor:
        out = attend()
        return out[0] if isinstance(out, tuple) else out

    return call


CONTENDERS: dict[str, Callable[[Workload, Tensors], Call]] = {
    "tcb": tcb,
    "tcb, shared list": tcb_shared_list,
    "tcb, one call": tcb_one_call,
    "tcb, overlapped": tcb_overlapped,
    "tcb, batch-invariant": tcb_batch_invariant,
    "torch flash": torch_flash,
    "torch flash, paged": torch_flash_paged,
    "cuDNN": partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "sdpa": sdpa,
    "FA3, paged": flash_attention_3,
}


def _decodes(workload: Workload, tensors: Tensors, out: Tensor) -> Call:
    count = workload.num_decodes
    return partial(
        paged_decode,
        tensors.query[:count],
        tensors.key_cache,
        tensors.value_cache,
        tensors.block_table[:count],
        tensors.total_len[:count],
        window=workload.window,
        out=out[:count],
    )


def _chunks(workload: Workload, tensors: Tensors, out: Tensor, first: int) -> Call:
    """`paged_attention` from sequence `first` on; those before have one token each."""
    return partial(
        paged_attention,
        tensors.query[first:],
        tensors.new_key[first:],
        tensors.new_value[first:],
        tensors.key_cache,
        tensors.value_cache,
        tensors.block_table[first:],
        tensors.query_start[first:] - first,
        tensors.context_len[first:],
        window=workload.window,
        out=out[first:],
    )


def _torch_flash(
    workload: Workload,
    tensors: Tensors,
    keys: Tensor,
    values: Tensor,
    key_start: Tensor,
    longest: int,
    **options: Tensor | int,
) -> Call:
    if workload.window is not None:
        # a window of W shows the W - 1 positions before the query's own
        options |= {"window_size_left": workload.window - 1, "window_size_right": 0}
    attend = partial(
        flash_operation,
        tensors.query,
        keys,
        values,
        tensors.query_start,
        key_start,
        max(new for _, new in workload.sequences),
        longest,
        # no dropout, causal, no debug output
        0.0,
        True,
        False,
        **options,
    )
    return lambda: attend()[0]


def _unrolled(workload: Workload, tensors: Tensors) -> Tensor:
    """The block table with a column for every page: what left the window names any block."""
    longest = max(context + new for context, new in workload.sequences)
    page = torch.arange(-(-longest // workload.page_size), device=tensors.query.device)
    return tensors.block_table[:, page % tensors.block_table.shape[1]].contiguous()
