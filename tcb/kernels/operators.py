"""The operations as torch operators `tcb::<name>`: what tracing sees of a call.

An operator says which tensors it writes and, by its fake form, which tensors it returns, so
`torch.compile`, `make_fx` and dispatch modes take it as one step. It runs what the direct call runs
(`forms`), checks included. Operators write results into tensors that they are given, and take only
tensors and numbers; the functions here have the arguments and results of `operations`, and make
what the caller left out.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tcb.kernels import forms
from tcb.kernels.contract import Listing, WorkList
from tcb.kernels.dispatch import use_triton

# alive as long as its operators
_LIBRARY = torch.library.Library("tcb", "FRAGMENT")
# shapes of a list that nobody reads: torch operations need none
_NO_LIST = ((0, 2), (0,), (3, 0))


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The operator of a schema, for all devices; `fake` makes what it returns, without values."""
    name = schema.partition("(")[0]
    # kernels need the dense last axis that their tensors were traced with
    tags = torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order
    _LIBRARY.define(schema, tags=tags)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tcb::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.tcb, name).default


def _nothing(*_: Any) -> None:
    pass


def _run_attention(*arguments: Any) -> None:
    *others, item, count = arguments
    others.append(None if item is None else WorkList(None, 0, item, count, item))
    forms.paged_attention(*others)


def _run_decode(*arguments: Any) -> None:
    forms.paged_decode(*arguments)


def _run_tables(*arguments: Any) -> None:
    forms.page_tables(*arguments)


def _run_sample(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    token, logprob = forms.sample(logits, *arguments)
    return token, logits.new_empty(0, dtype=torch.float32) if logprob is None else logprob


def _fake_sample(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    rows, want_logprob = logits.shape[0], arguments[-1]
    token = logits.new_empty(rows, dtype=torch.int64)
    return token, logits.new_empty(rows if want_logprob else 0, dtype=torch.float32)


def _run_list(query: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    work = forms.list_work(query, *arguments)
    return _unfilled(query, _NO_LIST) if work is None else (work.item, work.count, work.found)


def _fake_list(query: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    if not use_triton(query):
        return _unfilled(query, _NO_LIST)
    from tcb.kernels.gpu import paged_attention

    work = paged_attention.reserve_list(Listing(query, *arguments))
    return work.item, work.count, work.found


def _unfilled(like: Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(shape, dtype=torch.int32) for shape in shapes)


write_kv = _define(
    "write_kv(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot)"
    " -> ()",
    forms.write_kv,
    _nothing,
)
copy_blocks = _define(
    "copy_blocks(Tensor(a!) cache, Tensor source, Tensor target) -> ()",
    forms.copy_blocks,
    _nothing,
)
gather_blocks = _define(
    "gather_blocks(Tensor cache, Tensor block, Tensor(a!) out) -> ()",
    forms.gather_blocks,
    _nothing,
)
scatter_blocks = _define(
    "scatter_blocks(Tensor data, Tensor(a!) cache, Tensor block) -> ()",
    forms.scatter_blocks,
    _nothing,
)
_attention = _define(
    "paged_attention(Tensor query, Tensor key, Tensor value, Tensor key_cache, Tensor value_cache,"
    " Tensor block_table, Tensor query_start, Tensor context_len, int? window, float? softcap,"
    " Tensor? sinks, float? scale, Tensor(a!) out, bool deterministic, Tensor? item, Tensor? count)"
    " -> ()",
    _run_attention,
    _nothing,
)
_decode = _define(
    "paged_decode(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table,"
    " Tensor seq_len, int? window, float? softcap, Tensor? sinks, float? scale, int? num_splits,"
    " Tensor(a!) out) -> ()",
    _run_decode,
    _nothing,
)
_list = _define(
    "list_work(Tensor query, Tensor value, Tensor query_start, Tensor context_len, int? window,"
    " bool deterministic) -> (Tensor, Tensor, Tensor)",
    _run_list,
    _fake_list,
)
_tables = _define(
    "page_tables(Tensor(a!)[] tables, Tensor new_block, Tensor new_block_start,"
    " Tensor first_new_page, Tensor row, Tensor query_start, Tensor context_len, int page_size,"
    " SymInt? num_pages, Tensor(b!) slot, Tensor(c!)[] block_tables) -> ()",
    _run_tables,
    _nothing,
)
_sample = _define(
    "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p,"
    " Tensor seed, Tensor position, Tensor do_sample, bool want_logprob) -> (Tensor, Tensor)",
    _run_sample,
    _fake_sample,
)


def paged_attention(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
    """`operations.paged_attention`."""
    *options, out, deterministic, work_list = others
    if out is None:
        out = query.new_zeros((*query.shape[:2], value.shape[2]))
    work = (None, None) if work_list is None else (work_list.item, work_list.count)
    _attention(query, key, value, *options, out, deterministic, *work)
    return out


def list_work(*arguments: Any) -> WorkList:
    """`operations.list_work`; an empty list where torch operations attend."""
    return WorkList(None, 0, *_list(*arguments))


def paged_decode(query: Tensor, key_cache: Tensor, value_cache: Tensor, *others: Any) -> Tensor:
    """`operations.paged_decode`."""
    *options, out = others
    if out is None:
        out = query.new_empty((*query.shape[:2], value_cache.shape[3]))
    _decode(query, key_cache, value_cache, *options, out)
    return out


def page_tables(
    tables: Sequence[Tensor],
    new_block: Tensor,
    new_block_start: Tensor,
    first_new_page: Tensor,
    row: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    page_size: int,
    num_pages: int | None,
    slot: Tensor | None,
    block_tables: Sequence[Tensor] | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`operations.page_tables`."""
    if slot is None:
        slot = row.new_empty((len(tables), int(query_start[-1])), dtype=torch.int64)
    if block_tables is None:
        widths = [min(table.shape[1], num_pages or table.shape[1]) for table in tables]
        block_tables = [row.new_empty((len(row), width), dtype=torch.int32) for width in widths]
    edits = new_block, new_block_start, first_new_page
    batch = row, query_start, context_len
    _tables(tables, *edits, *batch, page_size, num_pages, slot, block_tables)
    return slot, tuple(block_tables)


def sample(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    """`operations.sample`."""
    token, logprob = _sample(*arguments)
    return token, logprob if arguments[-1] else None
