"""See a paged cache as one flat table, without a copy, where its strides allow.

    token table  [rows, kv_heads, dim]
                 the token at `within` in block b is row  b * steps.block + within
    head table   [rows, dim]
                 its head h is row  b * steps.block + within * steps.token + h * steps.head

It knows strides, and neither block tables nor what is computed. Tables span the whole cache and so
also memory that nobody has written: only rows of live slots may be read.
"""

from typing import NamedTuple

import torch


class Steps(NamedTuple):
    """Rows of a table from one block, token and head to the next."""

    block: int
    token: int
    head: int


def token_steps(cache: torch.Tensor) -> Steps | None:
    """Steps of the token table of a cache [blocks, page_size, kv_heads, dim]; None: it has none."""
    block, token = cache.stride()[:2]
    return Steps(block // token, 1, 0) if token and block % token == 0 else None


def head_steps(cache: torch.Tensor) -> Steps | None:
    """Steps of the head table of a cache [blocks, page_size, kv_heads, dim]; None: it has none."""
    dim = cache.shape[3]
    block, token, head = cache.stride()[:3]
    if block % dim or token % dim or head % dim:
        return None
    return Steps(block // dim, token // dim, head // dim)


def token_table(cache: torch.Tensor, steps: Steps) -> torch.Tensor:
    """`cache` as its token table [rows, kv_heads, dim]."""
    blocks, page_size, kv_heads, dim = cache.shape
    rows = (blocks - 1) * steps.block + page_size
    return cache.as_strided((rows, kv_heads, dim), cache.stride()[1:])


def num_head_rows(cache: torch.Tensor, steps: Steps) -> int:
    """Rows of the head table of `cache`."""
    blocks, page_size, kv_heads, _ = cache.shape
    return (
        (blocks - 1) * steps.block + (page_size - 1) * steps.token + (kv_heads - 1) * steps.head + 1
    )


def read_tokens(
    cache: torch.Tensor, block: torch.Tensor, within: torch.Tensor, out: torch.Tensor
) -> None:
    """Copy the tokens at `block`, `within`, each [count], into `out` [count, kv_heads, dim]."""
    steps = token_steps(cache)
    if steps is None:
        out.copy_(cache[block, within])
    else:
        torch.index_select(token_table(cache, steps), 0, block * steps.block + within, out=out)
