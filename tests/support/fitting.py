"""One call of each public operation that fits, by the names of its arguments."""

from collections.abc import Callable
from typing import Any

import torch

TOKENS, SEQUENCES, HEADS, KV_HEADS, DIM, VALUE_DIM = 6, 2, 4, 2, 16, 32
BLOCKS, PAGE_SIZE, COLUMNS, VOCAB = 5, 4, 3, 64


def attention():
    return {
        "query": torch.zeros(TOKENS, HEADS, DIM),
        "key": torch.zeros(TOKENS, KV_HEADS, DIM),
        "value": torch.zeros(TOKENS, KV_HEADS, VALUE_DIM),
        "key_cache": torch.zeros(BLOCKS, PAGE_SIZE, KV_HEADS, DIM),
        "value_cache": torch.zeros(BLOCKS, PAGE_SIZE, KV_HEADS, VALUE_DIM),
        "block_table": torch.zeros(SEQUENCES, COLUMNS, dtype=torch.int32),
        "query_start": torch.tensor([0, 2, TOKENS], dtype=torch.int32),
        "context_len": torch.tensor([3, 0], dtype=torch.int32),
        "sinks": torch.zeros(HEADS),
        "out": torch.full((TOKENS, HEADS, VALUE_DIM), 7.0),
    }


def decode():
    tensors = attention()
    for name in ("key", "value", "query_start"):
        del tensors[name]
    tensors["query"] = torch.zeros(SEQUENCES, HEADS, DIM)
    tensors["out"] = torch.full((SEQUENCES, HEADS, VALUE_DIM), 7.0)
    return tensors


def writing():
    tensors = attention()
    names = "key", "value", "key_cache", "value_cache"
    return {name: tensors[name] for name in names} | {"slot": torch.arange(TOKENS)}


def tables():
    entries = 2 * SEQUENCES
    return {
        "tables": [torch.zeros(8, COLUMNS, dtype=torch.int32) for _ in range(2)],
        "edit": torch.zeros(3, dtype=torch.int32),
        "edit_start": torch.zeros(entries + 1, dtype=torch.int32),
        "edit_page": torch.zeros(entries, dtype=torch.int32),
        "row": torch.arange(SEQUENCES, dtype=torch.int32),
        "query_start": torch.tensor([0, 2, TOKENS], dtype=torch.int32),
        "context_len": torch.tensor([3, 0], dtype=torch.int32),
        "page_size": PAGE_SIZE,
        "slot": torch.full((2, TOKENS), 7),
        "block_tables": [torch.full((SEQUENCES, COLUMNS), 7, dtype=torch.int32) for _ in range(2)],
    }


def copying():
    blocks = {"source": torch.tensor([0, 1]), "target": torch.tensor([2, 3])}
    return {"cache": torch.zeros(BLOCKS, 24)} | blocks


def gathering():
    tensors = {"cache": torch.zeros(BLOCKS, 24), "block": torch.tensor([0, 1])}
    return tensors | {"out": torch.full((2, 24), 7.0)}


def scattering():
    blocks = {"cache": torch.zeros(BLOCKS, 24), "block": torch.tensor([0, 1])}
    return {"data": torch.zeros(2, 24)} | blocks


def sampling():
    rows = 3
    return {
        "logits": torch.zeros(rows, VOCAB),
        **{name: torch.ones(rows) for name in ("temperature", "top_p", "min_p")},
        **{name: torch.zeros(rows, dtype=torch.int64) for name in ("top_k", "seed", "position")},
        "do_sample": torch.ones(rows, dtype=torch.bool),
    }


FITTING: dict[str, Callable[[], dict[str, Any]]] = {
    "paged_attention": attention,
    "paged_decode": decode,
    "write_kv": writing,
    "page_tables": tables,
    "copy_blocks": copying,
    "gather_blocks": gathering,
    "scatter_blocks": scattering,
    "sample": sampling,
}
