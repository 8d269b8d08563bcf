"""Read what a compiled kernel takes and holds: registers, memory, instructions, pipeline.

It knows processors and assembly languages, and nothing of what a kernel computes.
"""

import hashlib
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

MATRIX_UNITS = ("HGMMA", "HMMA", "UTCHMMA")


@dataclass(frozen=True, slots=True)
class Processor:
    """A target of the compiler, the tuning class it belongs to, and what one processor offers.

    processors       of the device that the class is named for
    shared           bytes of shared memory a processor has
    program_shared   bytes of it that one program may have
    warps            resident at once
    """

    target: str
    device_class: str
    processors: int
    shared: int
    program_shared: int
    warps: int

    @property
    def is_cuda(self) -> bool:
        return self.target.startswith("sm_")


# the sizes are those of the CUDA programming guide and of AMD's CDNA 3 and 4 white papers
PROCESSORS = {
    "sm_80": Processor("sm_80", "sm_80", 108, 164 << 10, 163 << 10, 64),
    "sm_90": Processor("sm_90", "sm_90", 132, 228 << 10, 227 << 10, 64),
    "sm_100": Processor("sm_100", "sm_100", 148, 228 << 10, 227 << 10, 64),
    "sm_120": Processor("sm_120", "sm_120", 188, 100 << 10, 99 << 10, 48),
    "gfx942": Processor("gfx942", "gfx9", 304, 64 << 10, 64 << 10, 32),
    "gfx950": Processor("gfx950", "gfx950", 256, 160 << 10, 160 << 10, 32),
    # the rows for small and unknown devices, compiled for one of little shared memory
    "other": Processor("sm_89", "other", 128, 100 << 10, 99 << 10, 48),
}


def count(kernel: Any) -> dict[str, Any]:
    """Registers, memory and instructions of a compiled kernel, and a hash of its machine code."""
    found = {
        "threads": kernel.metadata.num_warps * kernel.metadata.warp_size,
        "shared": kernel.metadata.shared,
    }
    code = kernel.asm["hsaco" if "amdgcn" in kernel.asm else "cubin"]
    found |= _count_amd(kernel.asm["amdgcn"]) if "amdgcn" in kernel.asm else _count_cuda(code)
    return found | {"hash": hashlib.sha256(code).hexdigest()[:16]}


def count_buffers(kernel: Any, keys: int) -> list[int]:
    """Tiles of keys or values that each buffer of a software pipeline holds, two buffers a loop.

    A pipelined load is a mutable allocation [tiles, keys, head size] in Triton's intermediate code.
    """
    pattern = rf"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x{keys}x\d+x\w+, [^>]*mutable>"
    return [int(tiles) for tiles in re.findall(pattern, kernel.asm["ttgir"])]


def count_resident(processor: Processor, registers: int, threads: int, shared: int) -> int:
    """Programs that a processor holds at once.

    CUDA: 65,536 registers, given to warps of 32 threads in steps of 8 a thread, and 1 KiB of shared
    memory a program for the system. AMD: four units with 512 registers a lane each, which are given
    to waves of 64 threads in steps of 8 a lane, at most 8 waves a unit.
    """
    granted = -(-registers // 8) * 8
    if processor.is_cuda:
        waves = threads // 32
        by_registers = 65536 // (granted * threads)
        shared += 1024
    else:
        waves = threads // 64
        by_registers = 4 * min(8, 512 // granted) // waves
    return min(by_registers, processor.shared // max(shared, 1), processor.warps // waves)


def _count_amd(text: str) -> dict[str, Any]:
    def number(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", text)[1])

    found = {"registers": number("vgpr_count"), "spills": number("vgpr_spill_count")}
    found["local"] = number("private_segment_fixed_size")
    bits = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32, "ushort": 16, "short": 16}
    for name in ("load", "store"):
        words = re.findall(rf"\b(?:global|buffer|flat)_{name}_(\w+)", text)
        widths = Counter(bits.get(word.removesuffix("_d16").split("_")[0], 8) for word in words)
        found[f"{name}s"] = _by_width(widths)
    found["MFMA"] = len(re.findall(r"v_mfma", text))
    return found


def _count_cuda(cubin: bytes) -> dict[str, Any]:
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run(tools / "cuobjdump", "-res-usage", file.name)
        code = _run(tools / "nvdisasm", "-c", file.name)
    stack, local = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("STACK", "LOCAL"))
    found = {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "local": stack + local,
    }
    operations = re.findall(r"\b(LDGSTS|LDG|STG)((?:\.\w+)*)", code)
    for key, name in (("copies", "LDGSTS"), ("loads", "LDG"), ("stores", "STG")):
        widths = Counter(_width(tail) for operation, tail in operations if operation == name)
        found[key] = _by_width(widths)
    for name in (*MATRIX_UNITS, "UTMALDG"):
        found[name] = len(re.findall(rf"\b{name}\b", code))
    return found


def _width(modifiers: str) -> int:
    """Bits of an access of SASS, from the modifiers of its opcode."""
    words = modifiers.split(".")
    known = {"128": 128, "64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8}
    return next((known[word] for word in words if word in known), 32)


def _by_width(widths: Counter[int]) -> dict[str, int]:
    """Accesses by their bits; keys are text, as in JSON."""
    return {str(bits): widths[bits] for bits in sorted(widths)}


def _run(*command: Any) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
