"""The kernels without engine or model: two sequences in a paged cache.

    python examples/kernels_alone.py

Prompts of 5 and 9 tokens are attended to in one packed call, then each sequence decodes one token.
On a GPU the Triton kernels run, on a CPU their torch forms; dense attention by torch is the check.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from tcb.kernels import paged_attention, paged_decode, write_kv

HEADS, KV_HEADS, DIM, PAGE_SIZE, BLOCKS = 4, 2, 64, 4, 8
LENGTHS = (5, 9)


def main() -> None:
    """Prefill, decode, and print how far each is from dense attention."""
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")

    def integers(values: list, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    key_cache, value_cache = torch.zeros(2, BLOCKS, PAGE_SIZE, KV_HEADS, DIM, device=device)
    # logical page p of a sequence lies in the block of column p; 0 fills what is not used yet
    block_table = integers([[6, 1, 0], [3, 0, 5]])

    # all tokens of both prompts, one behind the other, and the token that each decodes after them
    tokens, ends = sum(LENGTHS), (LENGTHS[0], sum(LENGTHS))
    query = torch.randn(tokens + 2, HEADS, DIM, device=device)
    key, value = torch.randn(2, tokens + 2, KV_HEADS, DIM, device=device)
    slots = [slot(block_table[i], p) for i, n in enumerate(LENGTHS) for p in range(n)]
    slots += [slot(block_table[i], n) for i, n in enumerate(LENGTHS)]

    write_kv(key, value, key_cache, value_cache, integers(slots, torch.int64))
    prefilled = paged_attention(
        query[:tokens],
        key[:tokens],
        value[:tokens],
        key_cache,
        value_cache,
        block_table,
        query_start=integers([0, *ends]),
        # nothing of a prompt is in the cache before its first chunk
        context_len=integers([0, 0]),
    )
    decoded = paged_decode(
        query[tokens:],
        key_cache,
        value_cache,
        block_table,
        # a decode sees its own token, which is in the cache already
        integers([n + 1 for n in LENGTHS]),
    )

    for i, (start, end) in enumerate(zip((0, ends[0]), ends, strict=True)):
        rows = [*range(start, end), tokens + i]
        dense = scaled_dot_product_attention(
            *(x[rows].transpose(0, 1) for x in (query, key, value)), is_causal=True, enable_gqa=True
        ).transpose(0, 1)
        print(f"sequence {i}: prefill differs by {difference(prefilled[start:end], dense[:-1])}")
        print(f"sequence {i}: decode differs by {difference(decoded[i], dense[-1])}")


def slot(table: torch.Tensor, position: int) -> int:
    """Where a token lies in the cache: its page's block, and its place in the page."""
    return int(table[position // PAGE_SIZE]) * PAGE_SIZE + position % PAGE_SIZE


def difference(one: torch.Tensor, other: torch.Tensor) -> str:
    """The largest difference of an element."""
    return f"{(one - other).abs().max().item():.1e}"


if __name__ == "__main__":
    main()
