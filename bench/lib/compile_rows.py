"""Compile every launch of the package ahead of time, as the launchers would start it.

Run as a program, with names of `PROCESSORS` as arguments and without TRITON_INTERPRET: prints a
JSON list a row, an object a launch; `sm_90:3,7` are two rows of one. A stand-in for the driver
names the architecture, tensors are on the meta device, and what a public function would launch is
recorded instead, so constants and alignments are those of real calls.
"""

import json
import sys
from contextlib import ExitStack
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from bench.lib.machine_code import PROCESSORS, Processor, count, count_buffers, count_resident
from tcb.kernels.gpu.launch import Launch
from tcb.kernels.gpu.tuning import DeviceFacts, Tile, choose_tile, list_rows, shared_need

EVERYTHING = {"window": 1024, "softcap": 30.0, "sinks": True}
SINGLE = {"dtype": "float32"}
# operation and fields of a call, all of whose launches are compiled: each row of the tuning table
# at the largest head size it serves, and odd head sizes, small pages and every option at least once
ROWS: list[tuple[str, dict[str, Any]]] = [
    *(("attention", {"dim": dim}) for dim in (64, 128, 256)),
    ("attention", {"dim": 128, "page_size": 16, **EVERYTHING}),
    ("attention", {"dim": 256, **EVERYTHING}),
    ("attention", {"dim": 80, "heads": 14, "kv_heads": 2}),
    ("attention", {"dim": 192, "value_dim": 128, "kv_heads": 32}),
    *(("attention", {"dim": dim, **SINGLE}) for dim in (128, 256)),
    *(("decode", {"dim": dim}) for dim in (64, 128, 256)),
    ("decode", {"dim": 128, "page_size": 16, **EVERYTHING}),
    ("decode", {"dim": 128, "heads": 64, "kv_heads": 1}),
    ("decode", {"dim": 256, "heads": 32, "kv_heads": 1}),
    ("decode", {"dim": 96, "heads": 20, "kv_heads": 4, "page_size": 12}),
    *(("decode", {"dim": dim, **SINGLE}) for dim in (128, 256)),
    ("write_kv", {"dim": 128}),
    ("write_kv", {"dim": 80, "heads": 14, "kv_heads": 2, "page_size": 16}),
    ("page_tables", {"groups": 1}),
    ("page_tables", {"groups": 3}),
    *((f"{name}_blocks", {}) for name in ("copy", "gather", "scatter")),
    ("sample", {"vocab": 151_936}),
    ("sample", {"vocab": 262_144, **SINGLE}),
]

SEQUENCES, TOKENS, BLOCKS, COLUMNS = 64, 4096, 512, 128


class Driver:
    """What Triton asks of a driver in order to compile; nothing can be launched with it."""

    def __init__(self, name: str):
        processor, name = PROCESSORS[name], PROCESSORS[name].target
        arch = int(name.removeprefix("sm_")) if processor.is_cuda else name
        backend, width = ("cuda", 32) if processor.is_cuda else ("hip", 64)
        self.target = GPUTarget(backend, arch, width)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return str(self.target.arch)

    def get_current_stream(self, device=None):
        return 0


def record(processor: Processor, operation: str, fields: dict[str, Any]) -> list[Launch]:
    """The launches of one call of an operation."""
    launches: list[Launch] = []
    facts = describe(processor)

    def collect(planned, tensor):
        launches.extend(planned)

    names = "paged_attention", "paged_decode", "kv_write", "page_tables", "page_copy", "sampling"
    modules = [import_module(f"tcb.kernels.gpu.{name}") for name in names]
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(patch.object(module, "start", collect))
            if hasattr(module, "read_device"):
                stack.enter_context(patch.object(module, "read_device", lambda *_: facts))
        call(operation, **fields)
    return launches


def describe(processor: Processor) -> DeviceFacts:
    return DeviceFacts(processor.device_class, processor.processors, processor.program_shared)


def call(operation, *, dim=128, value_dim=0, heads=32, kv_heads=8, page_size=64, dtype="bfloat16",
         window=None, softcap=None, sinks=False, groups=1, vocab=0):  # fmt: skip
    """Call an operation for 64 sequences, or as many rows, tensors on the meta device."""
    kernels = import_module("tcb.kernels")
    element = getattr(torch, dtype)

    def tensor(*shape, dtype=element):
        return torch.empty(shape, dtype=dtype, device="meta")

    def integers(*shape, dtype=torch.int32):
        return tensor(*shape, dtype=dtype)

    widths = dim, value_dim or dim
    caches = [tensor(BLOCKS, page_size, kv_heads, width) for width in widths]
    new = [tensor(TOKENS, kv_heads, width) for width in widths]
    table, lengths = integers(SEQUENCES, COLUMNS), integers(SEQUENCES)
    starts, many = integers(SEQUENCES + 1), integers(SEQUENCES, dtype=torch.int64)
    options = {"window": window, "softcap": softcap, "sinks": tensor(heads) if sinks else None}
    if operation == "attention":
        query = tensor(TOKENS, heads, dim)
        kernels.paged_attention(query, *new, *caches, table, starts, lengths, **options)
    elif operation == "decode":
        query = tensor(SEQUENCES, heads, dim)
        kernels.paged_decode(query, *caches, table, lengths, **options)
    elif operation == "write_kv":
        kernels.write_kv(*new, *caches, integers(TOKENS, dtype=torch.int64))
    elif operation == "page_tables":
        entries = groups * SEQUENCES
        edits = integers(entries), integers(entries + 1), integers(entries)
        slot = integers(groups, TOKENS, dtype=torch.int64)
        tables = [integers(256, COLUMNS) for _ in range(groups)]
        kernels.page_tables(tables, *edits, many, starts, lengths, page_size, slot=slot)
    elif operation == "sample":
        real = tensor(SEQUENCES, dtype=torch.float32)
        numbers = dict.fromkeys(("temperature", "top_p", "min_p"), real)
        numbers |= dict.fromkeys(("top_k", "seed", "position"), many)
        do_sample = tensor(SEQUENCES, dtype=torch.bool)
        kernels.sample(tensor(SEQUENCES, vocab), **numbers, do_sample=do_sample)
    else:
        pool, dense = tensor(BLOCKS, 65536), tensor(SEQUENCES, 65536)
        arguments = {"copy": (pool, many, many), "gather": (pool, many, dense)}
        arguments["scatter"] = dense, pool, many
        getattr(kernels, operation)(*arguments[operation.removesuffix("_blocks")])


def plan(name: str, kind: str, **fields: Any) -> Launch:
    """The launch of attention of this kind, for one of `PROCESSORS`."""
    processor, operation = PROCESSORS[name], "decode" if kind == "decode" else "attention"
    launches = record(processor, operation, fields)
    return next(launch for launch in launches if find_tile(processor, launch)[0] == kind)


def find_tile(processor: Processor, launch: Launch) -> tuple[str, Tile | None]:
    """The kind of a launch: wide, narrow or decode and its tile, or the name of its kernel."""
    constants, name = launch.constants, launch.kernel.__name__.removesuffix("_kernel")
    if "BLOCK_M" not in constants:
        return name, None
    facts, size = describe(processor), launch.arguments[0].ptr.element_size()
    dim = max(constants["KEYS"].dim, constants["VALUES"].dim)
    wide, narrow = (
        choose_tile(facts.name, kind, size, dim, constants["Q_PER_KV"], facts.shared)
        for kind in ("wide", "narrow")
    )
    shape = constants["BLOCK_M"], constants["BLOCK_N"], constants["num_warps"]
    is_wide = name == "paged_attention" and shape == tile_shape(wide)
    assert is_wide or shape == tile_shape(narrow), f"{name}: expected {narrow}, got {shape}"
    if is_wide:
        return "wide", wide
    return "decode" if name == "paged_decode" else "narrow", narrow


def compile_launch(processor: Processor, launch: Launch) -> dict[str, Any]:
    """What a launch's machine code holds and, of attention, its tile and what the tile promises."""
    constants = launch.constants
    kernel = launch.kernel.warmup(*launch.arguments, grid=(launch.programs,), **constants)
    found = count(kernel)
    memory = found["registers"], found["threads"], found["shared"]
    found["resident"] = count_resident(processor, *memory)
    kind, tile = find_tile(processor, launch)
    if tile is None:
        return {"kind": kind, **found}
    name, size = processor.device_class, launch.arguments[0].ptr.element_size()
    widths = constants["KEYS"].dim, constants["VALUES"].dim
    buffers = count_buffers(kernel, tile.keys)
    ahead = found["resident"] * count_ahead(processor, buffers)
    return {
        "kind": kind,
        "tile": [*tile_shape(tile), constants["num_stages"]],
        "claimed": tile.residency if is_row(tile, name, size) else 1,
        "shared_need": shared_need(name, tile, size, max(widths)),
        "buffers": buffers,
        "bytes_in_flight": ahead * tile.keys * sum(widths) * size,
        **found,
    }


def tile_shape(tile: Tile) -> tuple[int, int, int]:
    return tile.rows, tile.keys, tile.warps


def is_row(tile: Tile, name: str, element_size: int) -> bool:
    """Whether a tile is a row of the table as it stands, not one widened to hold many heads."""
    kinds = ("wide", "narrow")
    return any(tile == row for kind in kinds for _, row in list_rows(name, kind, element_size))


def count_ahead(processor: Processor, buffers: list[int]) -> int:
    """Tiles of keys and values on their way to a program even while it multiplies one.

    Asynchronous copies of CUDA land in the buffers: all of them but the one that is being read. AMD
    loads the next tile into registers, whatever the number of buffers behind them.
    """
    return min(buffers, default=1) - 1 if processor.is_cuda else 1


def main(names: list[str]) -> None:
    for name, _, picked in (name.partition(":") for name in names):
        processor = PROCESSORS[name]
        driver.set_active(Driver(name))
        rows = [ROWS[int(index)] for index in picked.split(",")] if picked else ROWS
        for operation, fields in rows:
            head = {"arch": name, "operation": operation, "fields": fields}
            launches = record(processor, operation, fields)
            found = [head | compile_launch(processor, launch) for launch in launches]
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
