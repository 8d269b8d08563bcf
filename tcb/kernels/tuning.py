"""Tile shapes of the attention kernels, a pure table, and the number of parts of a decode.

The table is keyed by device class, kind of launch, element size and head size: nothing here depends
on the lengths in a batch. Knows no kernel code; only `read_device` looks at a device.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

# the most parts that a decoding sequence is cut into
MAX_SPLITS = 128
# a part of fewer keys costs more to start than to read
MIN_PART_KEYS = 256
# programs of a decode that share a processor; the compile gate holds registers and memory to it
DECODE_RESIDENCY = 3


@dataclass(frozen=True, slots=True)
class Tile:
    """One launch configuration: query rows and keys of a tile, warps, pipeline stages.

    zones: walk the keys that every row sees without masks, in loops of their own. Worth it where
    arithmetic counts; each more loop drains the pipeline once.
    """

    rows: int
    keys: int
    warps: int = 4
    stages: int = 2
    zones: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def launch_options(self) -> dict[str, Any]:
        """The keywords of a Triton launch that are no arguments of the kernel."""
        return {"num_warps": self.warps, "num_stages": self.stages, **self.options}


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What the choices need to know of a device: its class and its number of processors."""

    name: str
    processors: int


def _wide(*shape: int, **options: Any) -> Tile:
    return Tile(*shape, zones=True, options=options)


# (device class, kind): ((largest head size, tile), ...) for elements of 2 bytes. Wide tiles are for
# chunks: from 64 rows a warp group on, sm_90 multiplies with WGMMA. Narrow ones are for few rows a
# sequence, where only bytes count. The compile gate holds every row of sm_80 and sm_90.
_TILES: dict[tuple[str, str], tuple[tuple[int, Tile], ...]] = {
    ("sm_90", "wide"): (
        (64, _wide(128, 64, 8, 3)),
        (128, _wide(128, 64, 8, 3)),
        (256, _wide(128, 32, 8, 3)),
    ),
    ("sm_90", "narrow"): (
        (64, Tile(16, 128, 4, 3)),
        (128, Tile(16, 64, 4, 3)),
        (256, Tile(16, 32, 4, 3)),
    ),
    ("sm_80", "wide"): (
        (64, _wide(128, 64, 8, 3)),
        (128, _wide(128, 32, 8, 3)),
        (256, _wide(64, 32, 8, 3)),
    ),
    # two programs a processor fit its 163 KiB
    ("sm_80", "narrow"): (
        (64, Tile(16, 128, 4, 3)),
        (128, Tile(16, 64, 4, 3)),
        (256, Tile(16, 32, 4, 3)),
    ),
    ("sm_100", "wide"): (
        (64, _wide(128, 64, 8, 3)),
        (128, _wide(128, 64, 8, 3)),
        (256, _wide(64, 32, 8, 3)),
    ),
    ("sm_100", "narrow"): (
        (64, Tile(16, 128, 4, 3)),
        (128, Tile(16, 64, 4, 3)),
        (256, Tile(16, 32, 4, 3)),
    ),
    ("gfx9", "wide"): (
        (128, _wide(128, 32, 8, 2, matrix_instr_nonkdim=16)),
        (256, _wide(64, 32, 8, 2, matrix_instr_nonkdim=16)),
    ),
    ("gfx9", "narrow"): ((128, Tile(16, 64, 2, 2)), (256, Tile(16, 32, 2, 2))),
    # small enough for whatever else Triton compiles for
    ("other", "wide"): ((128, _wide(64, 32, 4, 2)), (256, _wide(32, 16, 4, 2))),
    ("other", "narrow"): ((128, Tile(16, 32, 4, 2)), (256, Tile(16, 16, 4, 2))),
    # small enough for small cases to cross the edges of tiles
    ("interpreter", "wide"): ((256, _wide(32, 32)),),
    ("interpreter", "narrow"): ((256, Tile(16, 32)),),
}
# products of fp32 run on the plain units: their instructions are what costs, and their code size
_FP32_TILES = {
    "wide": ((64, Tile(32, 32, 4, 2)), (128, Tile(32, 32, 8, 2)), (256, Tile(16, 16, 4, 2))),
    "narrow": ((128, Tile(16, 32, 8, 2)), (256, Tile(16, 16, 4, 2))),
}
_CUDA_CLASSES = {80: "sm_80", 87: "sm_80", 90: "sm_90", 100: "sm_100", 103: "sm_100"}


def choose_tile(name: str, kind: str, element_size: int, dim: int, group: int) -> Tile:
    """The tile of a device class for a "wide" or "narrow" launch; dim is the larger head size.

    group is the number of query heads that share a key-value head: a narrow tile holds all of them
    where registers allow, so that keys are read once. Raises ValueError for a head size that no row
    of the table serves.
    """
    table = _TILES.get((name, kind), _TILES["other", kind])
    if element_size > 2 and name != "interpreter":
        table = _FP32_TILES[kind]
    tile = next((tile for largest, tile in table if dim <= largest), None)
    if tile is None:
        raise ValueError(f"query: expected head sizes of at most {table[-1][0]}, got {dim}")
    if kind == "narrow":
        rows = min(1 << (group - 1).bit_length(), 64 if dim <= 128 else 32)
        return replace(tile, rows=max(tile.rows, rows))
    return tile


def choose_splits(processors: int, work: int) -> int:
    """The most parts that a decoding sequence is cut into, from static shapes alone.

    work counts (sequence, head block) pairs. Few of them: as many parts as fill the device once,
    in one wave. Many: eight waves of parts, so that the last wave and a sequence longer than the
    others cost little.
    """
    capacity = processors * DECODE_RESIDENCY
    splits = capacity // work if 2 * work <= capacity else -(-8 * capacity // work)
    return max(1, min(splits, MAX_SPLITS))


@lru_cache(maxsize=64)
def read_device(kind: str, index: int | None) -> DeviceFacts:
    """Class and number of processors of a torch device; a CPU means the interpreter."""
    import torch

    if kind == "cpu":
        return DeviceFacts("interpreter", 4)
    properties = torch.get_device_module(kind).get_device_properties(index or 0)
    if kind == "xpu":
        return DeviceFacts("other", properties.max_compute_units)
    if torch.version.hip:
        name = "gfx9" if properties.gcnArchName.startswith("gfx9") else "other"
    else:
        capability = 10 * properties.major + properties.minor
        name = _CUDA_CLASSES.get(capability, "other")
    return DeviceFacts(name, properties.multi_processor_count)
