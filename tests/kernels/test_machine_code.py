"""What is read from compiled kernels, on texts and figures of known meaning."""

from types import SimpleNamespace

import pytest

from bench.lib.machine_code import PROCESSORS, count_buffers, count_resident

ALLOCATIONS = """
%query = ttg.local_alloc %1 : (tensor<16x128xbf16, #b>) -> !ttg.memdesc<16x128xbf16, #s, #smem>
%next = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared1, #smem, mutable> loc(#loc510)
%keys = ttg.local_alloc : () -> !ttg.memdesc<{}x64x128xbf16, #s, #smem, mutable> loc(#loc337)
%values = ttg.local_alloc : () -> !ttg.memdesc<{}x64x64xbf16, #s, #smem, mutable> loc(#loc338)
"""


@pytest.mark.parametrize("depth", [(2, 2), (3, 1), (1, 1)])
def test_buffers_of_a_pipeline_are_counted(depth):
    kernel = SimpleNamespace(asm={"ttgir": ALLOCATIONS.format(*depth)})
    assert count_buffers(kernel, 64) == list(depth)
    assert count_buffers(kernel, 32) == []


@pytest.mark.parametrize(
    ("name", "registers", "threads", "shared", "programs"),
    [
        # registers: 65,536 a processor, in steps of 8 a thread
        ("sm_90", 128, 128, 0, 4),
        ("sm_90", 129, 128, 0, 3),
        ("sm_90", 255, 256, 0, 1),
        # shared memory: 228 KiB, one of them taken from each program
        ("sm_90", 32, 128, 75 * 1024, 3),
        ("sm_90", 32, 128, 75 * 1024 + 1, 2),
        ("sm_80", 32, 128, 75 * 1024, 2),
        ("sm_120", 32, 128, 49 * 1024, 2),
        # warps: 64 a processor, 48 of sm_120
        ("sm_90", 16, 128, 0, 16),
        ("sm_120", 16, 128, 0, 12),
        # AMD: 512 registers a lane of each of four units, waves of 64
        ("gfx942", 256, 512, 0, 1),
        ("gfx942", 210, 128, 0, 4),
        ("gfx942", 210, 128, 32 * 1024, 2),
        ("gfx950", 210, 128, 32 * 1024, 4),
        ("gfx942", 64, 128, 0, 16),
        ("gfx942", 512, 512, 0, 0),
    ],
)
def test_resident_programs(name, registers, threads, shared, programs):
    assert count_resident(PROCESSORS[name], registers, threads, shared) == programs
