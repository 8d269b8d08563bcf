"""The operations as they run: each checks its tensors once and picks Triton or torch operations.

Names, tensors, results and errors are those of `operations`, which documents them; here every
argument is given. A form that has no use for an argument leaves it alone.
"""

from collections.abc import Sequence

from torch import Tensor

from tcb.kernels import contract
from tcb.kernels.contract import WorkList
from tcb.kernels.cpu import operations as cpu
from tcb.kernels.cpu import sampling as cpu_sampling
from tcb.kernels.dispatch import use_triton


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    scale: float | None,
    out: Tensor | None,
    deterministic: bool,
    work_list: WorkList | None,
) -> Tensor:
    """Attend from chunks; torch operations serve no `deterministic` and need no work list."""
    options = contract.AttentionOptions(window, softcap, sinks, scale)
    tensors = query, key, value, key_cache, value_cache, block_table, query_start, context_len
    problem = contract.Attention(*tensors, options, out).checked()
    if not use_triton(query):
        if deterministic:
            raise ValueError("deterministic: expected False for torch operations, got True")
        return cpu.paged_attention(*tensors, **options._asdict(), out=out)
    from tcb.kernels.gpu import paged_attention

    return paged_attention.attend(problem, deterministic, work_list)


def list_work(
    query: Tensor,
    value: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    window: int | None,
    deterministic: bool,
) -> WorkList | None:
    """List the tiles of a batch; None where torch operations attend."""
    lengths = query_start, context_len
    problem = contract.Listing(query, value, *lengths, window, deterministic).checked()
    if not use_triton(query):
        return None
    from tcb.kernels.gpu import paged_attention

    return paged_attention.list_work(problem)


def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_len: Tensor,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    scale: float | None,
    num_splits: int | None,
    out: Tensor | None,
) -> Tensor:
    """Attend from the newest position of every sequence."""
    options = contract.AttentionOptions(window, softcap, sinks, scale)
    tensors = query, key_cache, value_cache, block_table, seq_len
    problem = contract.Decode(*tensors, options, num_splits, out).checked()
    if not use_triton(query):
        return cpu.paged_decode(*tensors, **options._asdict(), num_splits=num_splits, out=out)
    from tcb.kernels.gpu import paged_decode

    return paged_decode.attend(problem)


def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot: Tensor
) -> None:
    """Store new keys and values in their slots."""
    problem = contract.KVWrite(key, value, key_cache, value_cache, slot).checked()
    if not use_triton(key):
        return cpu.write_kv(*problem)
    from tcb.kernels.gpu import kv_write

    kv_write.write(problem)


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
    """Edit the block tables; return slots and the batch's block tables."""
    edits = new_block, new_block_start, first_new_page
    batch = tables, *edits, row, query_start, context_len, page_size
    problem = contract.TableEdits(*batch, num_pages, slot, block_tables).checked()
    if not use_triton(row):
        return cpu.page_tables(*batch, num_pages=num_pages, slot=slot, block_tables=block_tables)
    from tcb.kernels.gpu import page_tables

    return page_tables.edit(problem)


def copy_blocks(cache: Tensor, source: Tensor, target: Tensor) -> None:
    """cache[target[i]] = cache[source[i]]."""
    contract.check_moves(cache, None, "", source=source, target=target)
    if not use_triton(cache):
        return cpu.copy_blocks(cache, source, target)
    from tcb.kernels.gpu import page_copy

    page_copy.move(cache, source, cache, target)


def gather_blocks(cache: Tensor, block: Tensor, out: Tensor) -> None:
    """out[i] = cache[block[i]]."""
    contract.check_moves(cache, out, "out", block=block)
    if not use_triton(cache):
        return cpu.gather_blocks(cache, block, out)
    from tcb.kernels.gpu import page_copy

    page_copy.move(cache, block, out, None)


def scatter_blocks(data: Tensor, cache: Tensor, block: Tensor) -> None:
    """cache[block[i]] = data[i]."""
    contract.check_moves(cache, data, "data", block=block)
    if not use_triton(cache):
        return cpu.scatter_blocks(data, cache, block)
    from tcb.kernels.gpu import page_copy

    page_copy.move(data, None, cache, block)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    do_sample: Tensor,
    want_logprob: bool,
) -> tuple[Tensor, Tensor | None]:
    """One token a row, and its log-probability where it is wanted."""
    numbers = temperature, top_k, top_p, min_p, seed, position, do_sample
    problem = contract.Sampling(logits, *numbers).checked()
    if not use_triton(logits):
        return cpu_sampling.sample(**problem._asdict(), want_logprob=want_logprob)
    from tcb.kernels.gpu import sampling

    return sampling.sample(problem, want_logprob)
