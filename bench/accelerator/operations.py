"""The small operations of a step, timed as attention is: writing, tables, copies and sampling.

Floors count every byte that must be read or written once; the comparators are torch's operations.
It knows how each is called, and no clock.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.accelerator.timings import Record, beside_floors, race, rotation, sets_for, summary
from tcb.kernels import copy_blocks, page_tables, sample, write_kv

_HEADS, _DIM, _PAGE = 8, 128, 256


@dataclass(frozen=True, slots=True)
class Operation:
    """`build(device)` makes one set of inputs; `calls` turn a set into something to time."""

    traffic: int
    size: int
    build: Callable[[torch.device], Any]
    calls: dict[str, Callable[[Any], Callable[[], Any]]]


def operations(small: bool) -> dict[str, Operation]:
    """Every operation at the sizes that matter, or tiny."""
    tokens, rows, vocab, blocks = (12, 2, 500, 8) if small else (16384, 64, 151_936, 1024)
    tables = 4 if small else 1024
    return {
        f"write {tokens} tokens": _write(tokens),
        "write 64 tokens": _write(4 if small else 64),
        f"tables of {tables} sequences": _tables(tables),
        f"copy {blocks} blocks": _copy(blocks, 1024 if small else 2**19),
        f"greedy, {rows} x {vocab}": _sample(rows, vocab, do_sample=False),
        f"top-k, top-p, {rows} x {vocab}": _sample(rows, vocab, do_sample=True),
    }


def time_operation(operation: Operation, device: torch.device, rounds: int) -> Record:
    """Time one operation beside torch's."""
    count = sets_for(operation.traffic, operation.size, device)
    if not count:
        return {"skipped": f"{operation.size / 2**30:.1f} GiB do not fit the free memory"}
    sets = [operation.build(device) for _ in range(count)]
    contenders = race(operation.calls, sets, device, rounds)
    floors = beside_floors(operation.traffic, 0, device)
    found = summary(contenders, floors["floor_us"])
    return rotation(count, operation.traffic, device) | floors | found


def _write(tokens: int) -> Operation:
    blocks = -(-tokens // _PAGE) + 1

    def build(device: torch.device) -> tuple:
        new = torch.randn(2, tokens, _HEADS, _DIM, device=device).bfloat16()
        caches = torch.zeros(2, blocks, _PAGE, _HEADS, _DIM, device=device).bfloat16()
        slot = torch.randperm(blocks * _PAGE, device=device)[:tokens]
        return *new, *caches, slot

    def indexed(key, value, key_cache, value_cache, slot):
        for new, cache in ((key, key_cache), (value, value_cache)):
            cache.view(-1, _HEADS, _DIM).index_copy_(0, slot, new)

    traffic = 2 * 2 * 2 * tokens * _HEADS * _DIM + 8 * tokens
    calls = {"tcb": lambda s: partial(write_kv, *s), "torch": lambda s: partial(indexed, *s)}
    return Operation(traffic, 2 * traffic, build, calls)


def _tables(sequences: int) -> Operation:
    # a full group and the ring of a sliding one; each 64th sequence gets a page in both
    widths = 128, 6

    def build(device: torch.device) -> dict[str, Any]:
        def count(*shape: int) -> torch.Tensor:
            numbers = torch.arange(math.prod(shape), dtype=torch.int32, device=device)
            return numbers.view(shape)

        pages = (count(2 * sequences) % 64 == 0).int()
        return {
            "tables": [count(sequences, width) for width in widths],
            "edit": count(2 * sequences),
            "edit_start": torch.cat([pages[:1] * 0, pages.cumsum(0).int()]),
            "edit_page": count(2 * sequences) % min(widths),
            "row": torch.randperm(sequences, device=device),
            "query_start": count(sequences + 1),
            "context_len": count(sequences),
            "page_size": _PAGE,
            "slot": torch.empty(2, sequences, dtype=torch.int64, device=device),
            "block_tables": [count(sequences, width) for width in widths],
        }

    def rows_alone(tables: list[torch.Tensor], row: torch.Tensor) -> list[torch.Tensor]:
        # less than what is asked
        return [table.index_select(0, row) for table in tables]

    calls = {
        "tcb": lambda s: partial(page_tables, **s),
        "torch, rows alone": lambda s: partial(rows_alone, s["tables"], s["row"]),
    }
    traffic = sequences * (2 * 4 * sum(widths) + 2 * 24)
    return Operation(traffic, 2 * traffic, build, calls)


def _copy(blocks: int, elements: int) -> Operation:
    def build(device: torch.device) -> tuple:
        cache = torch.randn(2 * blocks, elements, device=device).bfloat16()
        order = torch.randperm(2 * blocks, device=device)
        return cache, order[:blocks].contiguous(), order[blocks:].contiguous()

    def indexed(cache, source, target):
        cache[target] = cache[source]

    traffic = 2 * 2 * blocks * elements
    calls = {"tcb": lambda s: partial(copy_blocks, *s), "torch": lambda s: partial(indexed, *s)}
    return Operation(traffic, 3 * traffic, build, calls)


def _sample(rows: int, vocab: int, do_sample: bool) -> Operation:
    def build(device: torch.device) -> dict[str, torch.Tensor]:
        def full(value: Any) -> torch.Tensor:
            return torch.full((rows,), value, device=device)

        return {
            "logits": (3 * torch.randn(rows, vocab, device=device)).bfloat16(),
            "temperature": full(0.8),
            "top_k": full(50 if do_sample else 0),
            "top_p": full(0.95 if do_sample else 1.0),
            "min_p": full(0.0),
            "seed": torch.arange(rows, device=device),
            "position": torch.arange(rows, device=device),
            "do_sample": full(do_sample),
        }

    # torch only sorts, or takes the highest: less than what is asked
    other = partial(torch.sort, dim=-1) if do_sample else partial(torch.argmax, dim=-1)
    name = "torch, sort alone" if do_sample else "torch, argmax alone"
    calls = {
        "tcb": lambda s: partial(sample, **s),
        name: lambda s: partial(other, s["logits"]),
    }
    traffic = 2 * rows * vocab
    return Operation(traffic, 8 * traffic, build, calls)
