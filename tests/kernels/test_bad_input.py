"""What does not fit is refused before anything is launched, by the name of the tensor.

Each public operation has one call that fits; each of its tensors is then given the wrong dtype,
rank, extent, stride or device, and each operation sizes and options that it cannot serve.
"""

import importlib
import math
from collections.abc import Callable

import pytest
import torch

from tcb import kernels
from tcb.kernels.cpu.sampling import MAX_VOCAB
from tcb.kernels.gpu.tuning import DeviceFacts
from tests.support.fitting import (
    BLOCKS,
    DIM,
    FITTING,
    KV_HEADS,
    PAGE_SIZE,
    SEQUENCES,
    TOKENS,
    VALUE_DIM,
    VOCAB,
)

MODULES = ("paged_attention", "paged_decode", "kv_write", "page_tables", "page_copy", "sampling")


def tensors_of(operation):
    """(name in errors, argument, place in it) of every tensor of the call that fits."""
    for argument, value in FITTING[operation]().items():
        if isinstance(value, torch.Tensor):
            yield argument, argument, None
        elif isinstance(value, list):
            yield f"{argument}[1]", argument, 1


def strided(tensor):
    """The same values, every second element of memory."""
    wide = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])
    wide[..., ::2] = tensor
    return wide[..., ::2]


# what may be wrong of any tensor
FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dtype": lambda tensor: tensor.to(torch.complex64),
    "rank": lambda tensor: tensor[None],
    "no axis": lambda tensor: tensor.reshape(-1)[0],
    "extent": lambda tensor: torch.cat([tensor, tensor[:1]]),
    "last extent": lambda tensor: torch.cat([tensor, tensor[..., :1]], -1),
    "stride": strided,
    "device": lambda tensor: tensor.to("meta"),
}
# what is free: lists may be longer, pools have any number of blocks, tables of rows and columns
FREE = {
    *((f"page_tables-{name}", fault) for name in ("edit",) for fault in ("extent", "last extent")),
    ("page_tables-slot", "last extent"),
    *((f"paged_{name}-block_table", "last extent") for name in ("attention", "decode")),
    ("page_tables-tables[1]", "extent"),
    *((f"{name}_blocks-cache", "extent") for name in ("copy", "gather", "scatter")),
    ("copy_blocks-cache", "last extent"),
    ("copy_blocks-cache", "dtype"),
    ("sample-logits", "last extent"),
}
# tensors that say how the others must be: where they differ from them, one of the others is named
LEADING = {
    "paged_attention": ("query", "key_cache", "value_cache", "context_len"),
    "paged_decode": ("query", "key_cache", "value_cache"),
    "write_kv": ("key", "value_cache"),
    "page_tables": ("tables[1]", "row"),
    "copy_blocks": ("cache", "source"),
    "gather_blocks": ("cache", "block"),
    "scatter_blocks": ("cache", "block"),
    "sample": ("logits",),
}
DIFFERENCES = ("dtype", "extent", "last extent", "device")


def call(operation, arguments):
    return getattr(kernels, operation)(**arguments)


@pytest.fixture
def launches(monkeypatch):
    """What would be launched."""
    started = []
    for name in MODULES:
        module = importlib.import_module(f"tcb.kernels.gpu.{name}")
        monkeypatch.setattr(module, "start", lambda planned, _: started.extend(planned))
    return started


@pytest.mark.parametrize("operation", FITTING)
def test_the_call_that_fits_is_served(operation, device):
    call(operation, on(device, FITTING[operation]()))


@pytest.mark.parametrize(
    ("operation", "name", "argument", "place", "fault"),
    [
        pytest.param(operation, *where, fault, id=f"{operation}-{where[0]}-{fault}")
        for operation in FITTING
        for where in tensors_of(operation)
        for fault in FAULTS
        if (f"{operation}-{where[0]}", fault) not in FREE
    ],
)
def test_a_tensor_that_does_not_fit_is_named(operation, name, argument, place, fault, launches):
    arguments = FITTING[operation]()
    if place is None:
        arguments[argument] = FAULTS[fault](arguments[argument])
    else:
        arguments[argument][place] = FAULTS[fault](arguments[argument][place])
    named = refusal(operation, arguments)
    assert launches == []
    if name in LEADING[operation] and fault in DIFFERENCES:
        assert named in {other for other, _, _ in tensors_of(operation)} | {"tables[0]"}
    else:
        assert named == name


def refusal(operation, arguments):
    """The name that the error of a call begins with; the error says what was expected and found."""
    with pytest.raises(ValueError, match=r"^\S+: expected .*, got ") as caught:
        call(operation, arguments)
    return str(caught.value).split(":")[0]


def wide(*shape):
    """Zeros of a shape, its first axes all one row of memory."""
    return torch.zeros(shape[-1]).expand(shape)


# (operation, what is changed in the call that fits, the name in the error)
MISFITS = [
    *(
        case
        for operation in ("paged_attention", "paged_decode")
        for case in [
            (operation, {"window": 0}, "window"),
            (operation, {"window": -3}, "window"),
            (operation, {"softcap": 0.0}, "softcap"),
            (operation, {"softcap": math.nan}, "softcap"),
            (operation, {"scale": 0.0}, "scale"),
            (operation, {"scale": -1.0}, "scale"),
            (operation, {"scale": math.inf}, "scale"),
            (operation, {"block_table": torch.zeros(2, 0, dtype=torch.int32)}, "block_table"),
            (
                operation,
                {
                    "key_cache": wide(BLOCKS, 0, KV_HEADS, DIM),
                    "value_cache": wide(BLOCKS, 0, KV_HEADS, VALUE_DIM),
                },
                "key_cache",
            ),
            # 3 columns of 2^30 positions
            (
                operation,
                {
                    "key_cache": wide(BLOCKS, 2**30, KV_HEADS, DIM),
                    "value_cache": wide(BLOCKS, 2**30, KV_HEADS, VALUE_DIM),
                },
                "block_table",
            ),
        ]
    ),
    # head ratio
    (
        "paged_attention",
        {"query": wide(TOKENS, 5, DIM), "sinks": None, "out": wide(TOKENS, 5, VALUE_DIM)},
        "query",
    ),
    ("paged_decode", {"query": wide(SEQUENCES, 3, DIM), "sinks": None, "out": None}, "query"),
    ("paged_attention", {"query": wide(TOKENS, 0, DIM), "sinks": None, "out": None}, "query"),
    # more rows than 32 bits count
    ("paged_attention", {"query": wide(TOKENS, 2**29, DIM), "sinks": None, "out": None}, "query"),
    ("paged_decode", {"query": wide(SEQUENCES, 2**30, DIM), "sinks": None, "out": None}, "query"),
    ("paged_decode", {"num_splits": 0}, "num_splits"),
    ("paged_decode", {"num_splits": -1}, "num_splits"),
    ("paged_decode", {"num_splits": 129}, "num_splits"),
    (
        "write_kv",
        {
            "key": wide(TOKENS, 2**29, DIM),
            "value": wide(TOKENS, 2**29, VALUE_DIM),
            "key_cache": wide(BLOCKS, PAGE_SIZE, 2**29, DIM),
            "value_cache": wide(BLOCKS, PAGE_SIZE, 2**29, VALUE_DIM),
        },
        "key",
    ),
    (
        "write_kv",
        {
            "key_cache": wide(BLOCKS, 0, KV_HEADS, DIM),
            "value_cache": wide(BLOCKS, 0, KV_HEADS, VALUE_DIM),
        },
        "value_cache",
    ),
    ("write_kv", {"key_cache": torch.zeros(BLOCKS, PAGE_SIZE, KV_HEADS, DIM).int()}, "key_cache"),
    ("page_tables", {"page_size": 0}, "page_size"),
    ("page_tables", {"page_size": -4}, "page_size"),
    ("page_tables", {"num_pages": 0}, "num_pages"),
    ("page_tables", {"num_pages": -1}, "num_pages"),
    ("page_tables", {"tables": [torch.zeros(8, 0, dtype=torch.int32)] * 2}, "tables[0]"),
    ("page_tables", {"block_tables": []}, "block_tables"),
    ("sample", {"logits": torch.zeros(3, 0)}, "logits"),
    ("sample", {"logits": torch.zeros(3, MAX_VOCAB + 1)}, "logits"),
    ("sample", {"logits": torch.zeros(3, VOCAB, dtype=torch.int64)}, "logits"),
]


@pytest.mark.parametrize(
    ("operation", "changes", "name"),
    MISFITS,
    ids=[f"{case[0]}-{'-'.join(case[1])}-{i}" for i, case in enumerate(MISFITS)],
)
def test_a_size_or_an_option_that_cannot_be_served_is_named(operation, changes, name, launches):
    assert refusal(operation, FITTING[operation]() | changes) == name
    assert launches == []


@pytest.mark.parametrize("operation", ["paged_attention", "paged_decode"])
@pytest.mark.parametrize("value_dim", [257, 512])
def test_a_head_size_that_no_tile_serves_is_named(operation, value_dim, monkeypatch, launches):
    arguments = FITTING[operation]()
    arguments |= {"value_cache": wide(BLOCKS, PAGE_SIZE, KV_HEADS, value_dim), "out": None}
    if "value" in arguments:
        arguments["value"] = wide(TOKENS, KV_HEADS, value_dim)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert refusal(operation, arguments) == "query"


@pytest.mark.parametrize("operation", ["paged_attention", "paged_decode"])
def test_a_device_of_too_little_shared_memory_is_named(operation, monkeypatch):
    module = importlib.import_module(f"tcb.kernels.gpu.{operation}")
    facts = DeviceFacts("sm_80", 108, 2048)
    monkeypatch.setattr(module, "read_device", lambda *_: facts)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match=r"^device sm_80: expected at least \d+ bytes .* got 2048"):
        call(operation, FITTING[operation]())


def on(device, arguments):
    """The arguments with every tensor on a device."""
    moved = {}
    for name, value in arguments.items():
        if isinstance(value, list):
            moved[name] = [tensor.to(device) for tensor in value]
        else:
            moved[name] = value.to(device) if isinstance(value, torch.Tensor) else value
    return moved
