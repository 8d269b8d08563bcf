"""The public operations: each checks its tensors once, then runs on Triton or on torch operations.

Triton serves accelerators, and CPUs while its interpreter is on; it is loaded by the first call
that needs it. Every operation takes any strides with a dense last axis, and raises ValueError that
names the tensor whose shape, dtype, device or stride does not fit, or the option that nobody
serves. Where a call is traced (`dispatch.is_traced`) it is one torch operator, `tcb::<name>`, which
does the same.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

from torch import Tensor

from tcb.kernels import forms, operators
from tcb.kernels.contract import WorkList
from tcb.kernels.dispatch import is_traced

P = ParamSpec("P")
R = TypeVar("R")


def _renamed(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Accept keywords by their former names, given as former="present".

    An error names a keyword as the caller gave it.
    """

    def decorate(operation: Callable[P, R]) -> Callable[P, R]:
        @wraps(operation)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            given = {names[name]: name for name in names if name in kwargs}
            if not given:
                return operation(*args, **kwargs)
            for present, former in given.items():
                if present in kwargs:
                    raise TypeError(f"{present}: given twice, also as {former}")
                kwargs[present] = kwargs.pop(former)
            try:
                return operation(*args, **kwargs)
            except ValueError as error:
                field, colon, text = str(error).partition(":")
                raise ValueError(given.get(field, field) + colon + text) from None

        return call

    return decorate


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
    deterministic: bool = False,
    work_list: WorkList | None = None,
) -> Tensor:
    """Attend from the new tokens of every sequence to its cached context and themselves, causally.

    query        [tokens, heads, dim]
    key, value   [tokens, kv_heads, dim | value_dim], of the new tokens; not read from the cache
    key_cache    [blocks, page_size, kv_heads, dim]      value_cache  [..., value_dim]
    block_table  [sequences, columns] int32; logical page p of a sequence is in column p % columns
    query_start  [sequences + 1] int32; sequence i owns the tokens query_start[i]:query_start[i + 1]
    context_len  [sequences] int32; its positions that are in the cache, before its new tokens
    window       a query at position i sees the positions j with i - window < j <= i
    softcap      scores become softcap * tanh(score / softcap)
    sinks        [heads], one more logit a head in the denominator
    scale        dim**-0.5 by default
    deterministic  a token's bits depend on its own sequence alone: not on the batch around it, nor
                 on where chunks begin, one of a single token included. One tile shape serves all,
                 that of few rows, so long chunks take several times as long
    work_list    what `list_work` returned for these lengths, shapes and options; it serves all
                 layers that share them. Without one it is made anew; torch operations need none

    Returns out [tokens, heads, value_dim] in the dtype of query. Tokens of no sequence (padding)
    are 0 in a new `out`; in a given one they are left as they are. Raises ValueError, too, for
    `deterministic` where torch operations serve a CPU, whose bits nobody promises.
    """
    run = operators.paged_attention if is_traced() else forms.paged_attention
    tensors = query, key, value, key_cache, value_cache, block_table, query_start, context_len
    return run(*tensors, window, softcap, sinks, scale, out, deterministic, work_list)


def list_work(
    query: Tensor,
    value: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    *,
    window: int | None = None,
    deterministic: bool = False,
) -> WorkList | None:
    """List the tiles of a batch on the device, for the `work_list` of `paged_attention`.

    Tensors and options are those of `paged_attention`; of query and value only shapes and dtype
    count, so one list serves all layers of the same heads and the same window. None where torch
    operations attend.
    """
    run = operators.list_work if is_traced() else forms.list_work
    return run(query, value, query_start, context_len, window, deterministic)


@_renamed(context_len="seq_len")
def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_len: Tensor,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend from the newest position of every sequence, its key and value already in the cache.

    query        [sequences, heads, dim]
    key_cache    [blocks, page_size, kv_heads, dim]      value_cache  [..., value_dim]
    block_table  [sequences, columns] int32; logical page p of a sequence is in column p % columns
    seq_len      [sequences] int32, the query's own position included; 0 is padding, its out is 0.
                 `context_len` is its former name
    window       the query sees its own and the window - 1 positions before it
    softcap      scores become softcap * tanh(score / softcap)
    sinks        [heads], one more logit a head in the denominator
    scale        dim**-0.5 by default
    num_splits   the most parts that a sequence is cut into; the parts then depend on its own length
                 alone. By default the number of sequences and the device choose it

    Returns out [sequences, heads, value_dim] in the dtype of query.
    """
    run = operators.paged_decode if is_traced() else forms.paged_decode
    tensors = query, key_cache, value_cache, block_table, seq_len
    return run(*tensors, window, softcap, sinks, scale, num_splits, out)


def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot: Tensor
) -> None:
    """Store new keys and values in their slots; a negative slot is padding and is skipped.

    key, value    [tokens, kv_heads, dim | value_dim]
    key_cache     [blocks, page_size, kv_heads, dim]      value_cache  [..., value_dim]
    slot          [tokens] int64; no slot twice

    Writes both caches, in their dtype.
    """
    run = operators.write_kv if is_traced() else forms.write_kv
    run(key, value, key_cache, value_cache, slot)


@_renamed(edit="new_block", edit_start="new_block_start", edit_page="first_new_page")
def page_tables(
    tables: Sequence[Tensor],
    new_block: Tensor,
    new_block_start: Tensor,
    first_new_page: Tensor,
    row: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    page_size: int,
    *,
    num_pages: int | None = None,
    slot: Tensor | None = None,
    block_tables: Sequence[Tensor] | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Write new blocks into `tables`; return every new token's slots and the batch's block tables.

    tables       a group: [rows, columns] int32, contiguous, written; -1 where there is no block
    new_block    [new blocks] int32, those of new pages. Its former name is `edit`, and those of the
                 next two are `edit_start` and `edit_page`
    new_block_start  [groups * sequences + 1] int32: entry k, for sequence i of group g at
                 k = g * sequences + i, has new_block[new_block_start[k] : new_block_start[k + 1]]
    first_new_page   [groups * sequences] int32, the logical page of the first of them; the others
                 are the pages behind it, at most as many as the group has columns
    row          [sequences] int32 or int64, a row of the tables, none twice; a negative one is
                 padding and has no new blocks
    query_start  [sequences + 1] int32         context_len  [sequences] int32
    num_pages    more than every page of the batch: no result needs more columns

    slot          [groups, tokens] int64, block * page_size + position % page_size; -1 without a
                  block
    block_tables  a group: [sequences, columns, or num_pages if that is less] int32; contiguous
                  where given

    `slot` and `block_tables` are written in place where given; `new_block` and `slot` may be longer
    than the batch: the surplus is not read, or ends in -1. Nothing is written past the end of a
    `slot`. Without `slot` the host waits for the number of tokens, the last of `query_start`.
    """
    run = operators.page_tables if is_traced() else forms.page_tables
    edits = new_block, new_block_start, first_new_page
    batch = row, query_start, context_len
    return run(tables, *edits, *batch, page_size, num_pages, slot, block_tables)


def copy_blocks(cache: Tensor, source: Tensor, target: Tensor) -> None:
    """cache[target[i]] = cache[source[i]]; source[i] == target[i] changes nothing.

    cache           [blocks, elements], any dtype
    source, target  [pairs] int64; no target twice, and no block both read and written by two pairs

    Writes cache.
    """
    run = operators.copy_blocks if is_traced() else forms.copy_blocks
    run(cache, source, target)


def gather_blocks(cache: Tensor, block: Tensor, out: Tensor) -> None:
    """out[i] = cache[block[i]].

    cache  [blocks, elements]     block  [count] int64     out  [count, elements]

    Writes out.
    """
    run = operators.gather_blocks if is_traced() else forms.gather_blocks
    run(cache, block, out)


def scatter_blocks(data: Tensor, cache: Tensor, block: Tensor) -> None:
    """cache[block[i]] = data[i].

    data  [count, elements]     cache  [blocks, elements]     block  [count] int64, none twice

    Writes cache.
    """
    run = operators.scatter_blocks if is_traced() else forms.scatter_blocks
    run(data, cache, block)


def sample(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    do_sample: Tensor,
    want_logprob: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """One token a row [rows] int64 and its log-probability [rows] fp32 (None unless wanted).

    logits                     [rows, vocab] floating, vocab <= 2^19, last axis dense; unchanged
    temperature, top_p, min_p  [rows] fp32: > 0; 1 and more is off; 0 is off
    top_k, seed, position      [rows] int64: 0 is off; all 64 bits of the others key the draw
    do_sample                  [rows] bool

    A row without do_sample takes the lowest id of its highest logit. A row's result depends on its
    own logits and parameters alone. Of scores that tie at a threshold top-k keeps all, as
    transformers does, and top-p the lowest ids. The log-probability is that of the distribution
    drawn from. A row that holds NaN, or has do_sample and no finite maximum, gives -1 and NaN.
    Values are not read for checks.
    """
    run = operators.sample if is_traced() else forms.sample
    numbers = temperature, top_k, top_p, min_p, seed, position, do_sample
    return run(logits, *numbers, want_logprob)
