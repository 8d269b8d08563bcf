"""Every launch of the package, compiled ahead of time for hardware that is not here.

No launch spills registers. Of attention, keys, values, queries and outputs move in 16 bytes, wide
tiles multiply on the matrix units of their architecture, the pipeline is as deep as its row asks,
and as many programs fit a processor as the row claims.
"""

import json
import os
import subprocess
import sys

import pytest

from bench.lib import compile_rows
from bench.lib.compile_rows import ROWS
from bench.lib.machine_code import PROCESSORS
from tcb.kernels.gpu.tuning import _FP32_TILES, _TILES, list_rows

# compiled at every run of the tests, all else by `make archs`: a row for each kernel, with every
# option where it has any
DAILY_ARCH, DAILY = "sm_90", [3, 12, 19, 21, 22, 26]
UNITS = {"sm_80": "HMMA", "other": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "sm_120": "HMMA"}
UNITS |= dict.fromkeys(("gfx9", "gfx950"), "MFMA")
# the kind of launch that an operation is named for
MAIN_KIND = {"attention": "wide", **dict.fromkeys(("copy", "gather", "scatter"), "move_blocks")}
# kinds of launch that move vectors, and the bits of their other loads and stores: ids, lengths and
# sinks; slots; the parameters and results of a row; the partial maxima and sums of a decode
SMALLER = {
    **dict.fromkeys(("wide", "narrow"), (("32", "16"), ())),
    "decode": (("32", "16"), ("32",)),
    **dict.fromkeys(("write_kv", "move_blocks"), (("64",), ())),
    "sample": (("64", "32", "8"), ("64", "32")),
}
# bandwidth times latency of an H200 is 29 KB a processor; twice that hides the jitter of both
BYTES_IN_FLIGHT = 64 * 1024
HOLDS_IN_FLIGHT = ("sm_80", "sm_90", "sm_100")
HEAD_SIZES = (64, 128, 256)


def show(row) -> str:
    operation, fields = row
    return "-".join([operation, *(f"{name}{value}" for name, value in fields.items())])


@pytest.fixture(scope="module")
def compiled():
    """A function from an architecture, all rows of it or some (`name:3,7`), to the compiled rows;
    each call with another name compiles in a process of its own.
    """
    done = {}

    def rows(name):
        if name not in done:
            environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
            command = [sys.executable, "-m", compile_rows.__name__, name]
            result = subprocess.run(command, capture_output=True, text=True, env=environment)
            assert result.returncode == 0, result.stderr[-4000:]
            done[name] = [json.loads(line) for line in result.stdout.splitlines()]
        return done[name]

    return rows


def every_row(*architectures):
    return pytest.mark.parametrize(
        ("arch", "index"),
        [(arch, index) for arch in architectures for index in range(len(ROWS))],
        ids=[f"{arch}-{show(row)}" for arch in architectures for row in ROWS],
    )


def check_launch(launch):
    processor = PROCESSORS[launch["arch"]]
    assert launch["spills"] == launch["local"] == 0, launch
    assert launch["shared"] <= processor.program_shared, launch
    assert launch["resident"] >= 1, launch
    if launch["kind"] in SMALLER:
        check_widths(launch, processor.is_cuda)
    if "tile" in launch:
        check_tile(launch, processor)


def check_widths(launch, is_cuda):
    """Keys, values, queries, outputs and logits move 16 bytes at a time."""
    loads, stores, copies = launch["loads"], launch["stores"], launch.get("copies", {})
    smaller_loads, smaller_stores = SMALLER[launch["kind"]]
    if is_cuda:
        assert loads.get("128", 0) + copies.get("128", 0) > 0, launch
        assert stores.get("128", 0) > 0 or launch["kind"] == "sample", launch
        assert loads.keys() <= {"128", *smaller_loads}, launch
        assert stores.keys() <= {"128", *smaller_stores}, launch
        assert copies.keys() <= {"128"}, launch
    else:
        # waves of 64 threads share what warps of 32 do, and a lane of the matrix units owns four
        # elements of a row of the output
        assert loads.get("128", 0) > 0 or "tile" not in launch, launch
        assert {"64", "128"} & loads.keys() and {"64", "128"} & stores.keys(), launch
        assert loads.keys() <= {"64", "128", *smaller_loads}, launch
        assert stores.keys() <= {"64", "128", *smaller_stores}, launch


def check_tile(launch, processor):
    """The tile of an attention launch: its memory, pipeline, matrix units and residency."""
    half = launch["fields"].get("dtype") != "float32"
    assert launch["shared"] <= launch["shared_need"], launch
    # matrix units that read shared memory on their own keep one buffer more
    asynchronous = launch.get("HGMMA", 0) + launch.get("UTCHMMA", 0) > 0
    buffers = launch["buffers"]
    assert buffers and len(buffers) % 2 == 0, launch
    assert min(buffers) >= launch["tile"][3] - (not asynchronous), launch
    if launch["kind"] == "wide" and half:
        unit = UNITS[processor.device_class]
        assert launch[unit] > 0, launch
    if launch["kind"] == "decode" and half:
        assert launch["resident"] >= launch["claimed"], launch
        # a head of fewer elements than its block leaves a part of each copy out
        is_full = launch["fields"]["dim"] in HEAD_SIZES
        if launch["claimed"] > 1 and is_full and processor.device_class in HOLDS_IN_FLIGHT:
            assert launch["bytes_in_flight"] >= BYTES_IN_FLIGHT, launch


@pytest.mark.parametrize("index", DAILY, ids=lambda index: show(ROWS[index]))
def test_machine_code(index, compiled):
    rows = compiled(f"{DAILY_ARCH}:{','.join(map(str, DAILY))}")
    check_row(rows[DAILY.index(index)], ROWS[index][0])


def test_every_operation_is_compiled_at_every_run():
    assert {ROWS[index][0] for index in DAILY} >= {operation for operation, _ in ROWS} - {
        "gather_blocks",
        "scatter_blocks",
    }


@pytest.mark.archs
@every_row(*PROCESSORS)
def test_machine_code_of_every_architecture(arch, index, compiled):
    check_row(compiled(arch)[index], ROWS[index][0])


def check_row(launches, operation):
    main_kind = MAIN_KIND.get(operation.removesuffix("_blocks"), operation)
    assert main_kind in {launch["kind"] for launch in launches}, launches
    for launch in launches:
        assert launch["operation"] == operation, launch
        check_launch(launch)


# what a good launch may look like, and what makes it a bad one
GOOD = {
    "arch": "sm_90",
    "operation": "decode",
    "fields": {"dim": 128},
    "kind": "decode",
    "tile": [16, 64, 4, 3],
    "claimed": 3,
    "shared": 71680,
    "shared_need": 107008,
    "buffers": [2, 2],
    "bytes_in_flight": 98304,
    "registers": 112,
    "spills": 0,
    "local": 0,
    "resident": 3,
    "loads": {"32": 11, "128": 1},
    "stores": {"32": 2, "128": 2},
    "copies": {"128": 48},
    "HGMMA": 0,
    "HMMA": 32,
    "UTCHMMA": 0,
}
WIDE = {"kind": "wide", "tile": [128, 64, 8, 3], "buffers": [3, 3], "HGMMA": 24}
WIDE |= {"claimed": 1, "resident": 1, "stores": {"128": 8}}


def test_a_good_launch_passes():
    check_launch(GOOD)
    check_launch(GOOD | WIDE)


@pytest.mark.parametrize(
    "change",
    [
        {"spills": 1},
        {"local": 8},
        {"shared": 228 * 1024},
        {"shared_need": 71679},
        {"resident": 2},
        {"resident": 0, "claimed": 0},
        {"bytes_in_flight": 65535},
        {"buffers": [1, 1]},
        {"buffers": [2, 1]},
        {"buffers": []},
        {"loads": {"32": 11, "64": 2}, "copies": {}},
        {"copies": {"128": 48, "64": 1}},
        {"copies": {}, "loads": {"32": 1}},
        {"stores": {"32": 2, "16": 2}},
        {"stores": {"32": 2}},
        WIDE | {"HGMMA": 0},
        WIDE | {"buffers": [3, 3, 2, 2]},
    ],
    ids=str,
)
def test_a_bad_launch_is_refused(change):
    with pytest.raises(AssertionError):
        check_launch(GOOD | change)


def table_rows():
    """(device class, kind, element size, largest head size) of each row but the interpreter's."""
    for (name, kind), rows in _TILES.items():
        if name != "interpreter":
            yield from ((name, kind, 2, largest) for largest, _ in rows)
    for kind, rows in _FP32_TILES.items():
        yield from (("other", kind, 4, largest) for largest, _ in rows)


@pytest.mark.parametrize("row", list(table_rows()), ids=str)
def test_every_row_of_the_table_is_compiled(row):
    name, kind, size, largest = row
    assert name in {processor.device_class for processor in PROCESSORS.values()}
    operations = ("attention",) if kind == "wide" else ("attention", "decode")
    for operation in operations:
        dims = compiled_dims(operation, size)
        served = [first_row(name, kind, size, dim) for dim in dims]
        assert largest in served, f"{operation}: no row of the compile gate takes {row}"


def compiled_dims(operation, size):
    """The head sizes, at 32 heads and eight for keys, at which the gate compiles an operation."""
    for name, fields in ROWS:
        half = fields.get("dtype") != "float32"
        if name == operation and half == (size == 2) and fields.get("kv_heads", 8) == 8:
            yield fields["dim"]


def first_row(name, kind, size, dim):
    return next(largest for largest, _ in list_rows(name, kind, size) if dim <= largest)
