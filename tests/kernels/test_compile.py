"""The attention kernels, compiled ahead of time for hardware that is not here.

No row spills registers or loads keys in less than 16 bytes, wide tiles multiply on the matrix units
of their architecture, and as many programs fit a processor as the parts of a decode count on.
"""

import json
import os
import subprocess
import sys

import pytest

from tcb.kernels.tuning import DECODE_RESIDENCY
from tests.kernels import compile_rows

# bytes of shared memory of a processor that programs can use, each less 1 KiB that the system takes
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
REGISTERS = 65536
RESIDENCY = {"sm_80": 2, "sm_90": DECODE_RESIDENCY, "sm_100": DECODE_RESIDENCY}


def show(row) -> str:
    kind, fields = row
    return "-".join([kind, *(f"{name}{value}" for name, value in fields.items())])


@pytest.fixture(scope="module")
def compiled():
    """A function from architecture to its compiled rows; each compiles in a process of its own."""
    done = {}

    def rows(arch):
        if arch not in done:
            environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
            command = [sys.executable, "-m", compile_rows.__name__, arch]
            result = subprocess.run(command, capture_output=True, text=True, env=environment)
            assert result.returncode == 0, result.stderr[-4000:]
            done[arch] = [json.loads(line) for line in result.stdout.splitlines()]
        return done[arch]

    return rows


def every_row(*architectures):
    return pytest.mark.parametrize(
        ("arch", "index"),
        [(arch, index) for arch in architectures for index in range(len(compile_rows.ROWS))],
        ids=[f"{arch}-{show(row)}" for arch in architectures for row in compile_rows.ROWS],
    )


def check_cuda(row):
    assert row["spills"] == 0, row
    fields = row["fields"]
    half = fields.get("dtype") != "float32"
    if row["kind"] != "merge":
        assert row["LDGSTS"] == row["LDGSTS.128"] > 0, row
    # many query heads a key-value head make a tile of more rows: fewer fit, and need not
    if row["kind"] == "decode" and half and fields.get("kv_heads") != 1:
        programs = RESIDENCY[row["arch"]]
        assert row["registers"] * row["threads"] * programs <= REGISTERS, row
        assert (row["shared"] + 1024) * programs <= SHARED[row["arch"]], row
    else:
        assert row["registers"] * row["threads"] <= REGISTERS, row
        assert row["shared"] + 1024 <= SHARED[row["arch"]], row
    if row["kind"] == "wide" and half:
        unit = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA"}[row["arch"]]
        assert row[unit] > 0, row


@every_row("sm_80", "sm_90")
def test_machine_code(arch, index, compiled):
    check_cuda(compiled(arch)[index])


@pytest.mark.archs
@every_row("sm_100")
def test_machine_code_of_blackwell(arch, index, compiled):
    check_cuda(compiled(arch)[index])


@pytest.mark.archs
@every_row("gfx942")
def test_machine_code_of_amd(arch, index, compiled):
    row = compiled(arch)[index]
    assert row["spills"] == 0, row
    assert row["shared"] <= 64 * 1024, row
    if row["kind"] == "wide" and row["fields"].get("dtype") != "float32":
        assert row["MFMA"] > 0, row
