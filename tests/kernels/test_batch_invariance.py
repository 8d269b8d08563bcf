"""With `deterministic` the bits of a token hang on its own sequence alone.

The tiles are those of real hardware, where a narrow one holds more keys than a wide one.
"""

import re
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tcb.kernels import paged_attention, paged_decode
from tcb.kernels.gpu import paged_attention as gpu_attention
from tcb.kernels.gpu import paged_decode as gpu_decode
from tcb.kernels.gpu.tuning import DeviceFacts

PAGE_SIZE = 16
HALF = torch.float16
DIM = 16
# one token, one page, a page and more, beyond one tile of keys
LENGTHS = (1, 16, 20, 150)


@dataclass(frozen=True, slots=True)
class Setting:
    """Shapes and options of attention; sinks are a logit a head."""

    dtype: torch.dtype = torch.float32
    heads: int = 2
    kv_heads: int = 1
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    def __str__(self) -> str:
        names = f"{self.dtype}-h{self.heads}/{self.kv_heads}-window{self.window}"
        return f"{names}-softcap{self.softcap}-sinks{self.has_sinks}".removeprefix("torch.")


SETTINGS = [
    Setting(),
    Setting(dtype=HALF, heads=5, kv_heads=1, window=33, softcap=20.0, has_sinks=True),
    Setting(dtype=HALF, heads=4, kv_heads=2),
]


@pytest.fixture(autouse=True)
def like_hardware(monkeypatch, device):
    """In the interpreter: the tiles of sm_90, and products whose rows are computed one by one.

    Matrix units treat the rows of a tile alike; in numpy the place of a row can change its bits.
    """
    if device.type != "cpu":
        return

    def create_dot(self, a, b, d, *_):
        kind = d.data.dtype
        rows = [np.matmul(row, b.data, dtype=kind) for row in a.data]
        return TensorHandle(np.stack(rows) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    facts = DeviceFacts("sm_90", 4)
    for module in (gpu_attention, gpu_decode):
        monkeypatch.setattr(module, "read_device", lambda *_: facts)


class Sequences:
    """Queries, keys and values of all positions of some sequences, the latter two in pages too."""

    def __init__(self, setting, device):
        generator = torch.Generator().manual_seed(11)

        def normal(*shape):
            return torch.randn(*shape, generator=generator).to(setting.dtype).to(device)

        self.setting, self.device = setting, device
        self.query = [normal(length, setting.heads, DIM) for length in LENGTHS]
        self.key = [normal(length, setting.kv_heads, DIM) for length in LENGTHS]
        self.value = [normal(length, setting.kv_heads, DIM) for length in LENGTHS]
        columns = -(-max(LENGTHS) // PAGE_SIZE)
        blocks = torch.randperm(len(LENGTHS) * columns, generator=generator).to(device)
        self.table = blocks.view(len(LENGTHS), columns).int()
        self.caches = [self._in_pages(self.key), self._in_pages(self.value)]
        self.sinks = normal(setting.heads) if setting.has_sinks else None

    def _in_pages(self, rows):
        pages = rows[0].new_zeros(self.table.numel(), PAGE_SIZE, *rows[0].shape[1:])
        for table, sequence in zip(self.table.long(), rows, strict=True):
            position = torch.arange(len(sequence), device=self.device)
            pages[table[position // PAGE_SIZE], position % PAGE_SIZE] = sequence
        return pages

    def attend(self, chunks, *, deterministic=True, padding=0):
        """Outputs of one batch of chunks (sequence, first position, end position)."""
        new = [
            torch.cat([rows[i][first:end] for i, first, end in chunks])
            for rows in (self.query, self.key, self.value)
        ]
        new = [torch.cat([part, part.new_full((padding, *part.shape[1:]), 3.0)]) for part in new]
        sizes = [end - first for _, first, end in chunks]
        out = paged_attention(
            *new,
            *self.caches,
            self.table[[i for i, _, _ in chunks]],
            torch.tensor([0, *sizes], device=self.device).cumsum(0).int(),
            torch.tensor([first for _, first, _ in chunks], device=self.device).int(),
            window=self.setting.window,
            softcap=self.setting.softcap,
            sinks=self.sinks,
            deterministic=deterministic,
        )
        assert torch.isfinite(out).all()
        return out.split([*sizes, padding])[: len(sizes)]

    def alone(self, i, **options):
        return self.attend([(i, 0, LENGTHS[i])], **options)[0]


def steps_of(cuts):
    """Batches in which every sequence goes on to its next cut; those at their end are left out."""
    batches = []
    for first, end in zip([0, *cuts], [*cuts, max(LENGTHS)], strict=True):
        chunks = [(i, first, min(end, length)) for i, length in enumerate(LENGTHS)]
        batches.append([chunk for chunk in chunks if chunk[1] < chunk[2]])
    return batches


WHOLE = [(i, 0, length) for i, length in enumerate(LENGTHS)]
LATE = max(LENGTHS) - 3
# how the same tokens can be computed: lists of batches
WAYS = {
    "all in one batch, in another order": [[WHOLE[i] for i in (2, 3, 1, 0)]],
    "two batches": [[WHOLE[i] for i in order] for order in ((3, 0), (2, 1))],
    "cut at page borders": steps_of([16, 64, 128]),
    "cut anywhere, each alone": [[chunk] for batch in steps_of([7, 40]) for chunk in batch],
    "the last tokens one by one": steps_of([LATE, LATE + 1, LATE + 2]),
}


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_bits_are_those_of_the_sequence_alone(setting, device):
    sequences = Sequences(setting, device)
    expected = [sequences.alone(i) for i in range(len(LENGTHS))]
    for way, batches in WAYS.items():
        found = [torch.full_like(one, float("nan")) for one in expected]
        for padding, chunks in enumerate(batches):
            for (i, first, end), out in zip(
                chunks, sequences.attend(chunks, padding=padding), strict=True
            ):
                found[i][first:end] = out
        for i, one in enumerate(found):
            assert torch.isfinite(one).all(), (way, i)
            assert torch.equal(one, expected[i]), (way, i)


def test_without_it_bits_differ(device):
    # a token alone is served by a tile of few rows and 128 keys, in a chunk by one of 64 keys
    sequences = Sequences(Setting(dtype=HALF), device)
    longest = len(LENGTHS) - 1
    end = LENGTHS[longest]
    whole = sequences.alone(longest, deterministic=False)[-1:]
    (single,) = sequences.attend([(longest, end - 1, end)], deterministic=False)
    assert not torch.equal(whole, single)


def test_torch_operations_do_not_promise_it(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"^deterministic: expected False .* got True"):
        Sequences(Setting(), torch.device("cpu")).alone(0)


def decode(sequences, picked, **options):
    """The outputs of the last positions of some sequences."""
    return paged_decode(
        torch.stack([sequences.query[i][-1] for i in picked]),
        *sequences.caches,
        sequences.table[picked],
        torch.tensor([LENGTHS[i] for i in picked], device=sequences.device).int(),
        **options,
    )


@pytest.mark.parametrize("num_splits", [1, 3])
def test_decode_of_given_splits_hangs_on_the_sequence_alone(num_splits, device):
    sequences = Sequences(Setting(dtype=HALF), device)
    order = [3, 0, 1, 2]
    together = decode(sequences, order, num_splits=num_splits)
    assert torch.isfinite(together).all()
    for i, one in zip(order, together, strict=True):
        assert torch.equal(decode(sequences, [i], num_splits=num_splits)[0], one)


PTX = """
from triton.runtime import driver
from bench.lib import compile_rows
driver.set_active(compile_rows.Driver("sm_90"))
launch = compile_rows.plan("sm_90", "narrow", dim=64)
grid = (launch.programs,)
print(launch.kernel.warmup(*launch.arguments, grid=grid, **launch.constants).asm["ptx"])
"""


def test_a_hidden_tile_scales_sums_by_exactly_one(monkeypatch):
    # a multiply-add of the maximum and its rounded product is not 0, so its power is not 1
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    command = [sys.executable, "-c", PTX]
    ptx = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assigned = re.findall(r"^\s*(\w+)\S*\s+(%\w+), (.*);", ptx, re.MULTILINE)
    source = {register: (name, operands) for name, register, operands in assigned}
    powers = [source[operands] for name, _, operands in assigned if name == "ex2"]
    decays = [operands for name, operands in powers if name == "mul"]
    assert {name for name, _ in powers} == {"fma", "mul"}
    assert len(decays) == 2
    for operands in decays:
        assert "sub" in {source[register][0] for register in operands.split(", ")}
