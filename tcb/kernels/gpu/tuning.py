"""Tile shapes of the attention kernels, a pure table, and the number of parts of a decode.

The table is keyed by device class, kind of launch, element size and head size: nothing here depends
on the lengths in a batch. A device with less shared memory than a row needs gets the next smaller
row. Knows no kernel code; only `read_device` looks at a device.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from tcb.kernels.contract import MAX_SPLITS

# a part of fewer keys costs more to start than to read
MIN_PART_KEYS = 256
# programs of a decode that share a processor, where its row does not say otherwise
DECODE_RESIDENCY = 3


@dataclass(frozen=True, slots=True)
class Tile:
    """One launch configuration: query rows and keys of a tile, warps, pipeline stages.

    zones: walk the keys that every row sees without masks, in loops of their own. Worth it where
    arithmetic counts; each more loop drains the pipeline once.
    residency: programs of a decode that a processor has the registers and the shared memory for at
    once, where rows are those of the table; the compile gate holds rows of 2 bytes to it.
    """

    rows: int
    keys: int
    warps: int = 4
    stages: int = 2
    zones: bool = False
    residency: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def launch_options(self) -> dict[str, Any]:
        """The keywords of a Triton launch that are no arguments of the kernel."""
        return {"num_warps": self.warps, "num_stages": self.stages, **self.options}


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What the choices need to know of a device.

    name: its class, a key of the table; shared: bytes of shared memory that a program may have,
    None where nobody says.
    """

    name: str
    processors: int
    shared: int | None = None


def _wide(rows: int, keys: int, warps: int = 4, stages: int = 2, **options: Any) -> Tile:
    return Tile(rows, keys, warps, stages, zones=True, options=options)


def _narrow(
    rows: int, keys: int, warps: int = 4, stages: int = 2, residency: int = DECODE_RESIDENCY
) -> Tile:
    return Tile(rows, keys, warps, stages, residency=residency)


# (device class, kind): ((largest head size, tile), ...) for elements of 2 bytes. Wide tiles are for
# chunks: from 64 rows a warp group on, sm_90 multiplies with WGMMA. Narrow ones are for few rows a
# sequence, where only bytes count. The compile gate holds every row but those of the interpreter.
_TILES: dict[tuple[str, str], tuple[tuple[int, Tile], ...]] = {
    ("sm_90", "wide"): (
        (64, _wide(128, 64, 8, 3)),
        (128, _wide(128, 64, 8, 3)),
        (256, _wide(128, 32, 8, 3)),
    ),
    ("sm_90", "narrow"): (
        (64, _narrow(16, 128, 4, 3)),
        (128, _narrow(16, 64, 4, 3)),
        (256, _narrow(16, 32, 4, 3)),
    ),
    ("sm_80", "wide"): (
        (64, _wide(128, 64, 8, 3)),
        (128, _wide(128, 32, 8, 3)),
        (256, _wide(64, 32, 8, 3)),
    ),
    # two programs a processor fit its 163 KiB
    ("sm_80", "narrow"): (
        (64, _narrow(16, 128, 4, 3, residency=2)),
        (128, _narrow(16, 64, 4, 3, residency=2)),
        (256, _narrow(16, 32, 4, 3, residency=2)),
    ),
    # sums and scores pass through registers on their way to and from tensor memory: twice the keys
    # spill up to 66 of them
    ("sm_100", "wide"): (
        (64, _wide(128, 64, 8, 3)),
        (128, _wide(128, 32, 8, 3)),
        (256, _wide(64, 16, 8, 3)),
    ),
    ("sm_100", "narrow"): (
        (64, _narrow(16, 128, 4, 3)),
        (128, _narrow(16, 64, 4, 3)),
        (256, _narrow(16, 32, 4, 3)),
    ),
    # 100 KiB a processor: sm_86 and sm_89 too. At head size 128, (128, 64, 8, 2) has all its 255
    # registers taken in the same 64 KiB; this row has 60 to spare
    ("sm_120", "wide"): (
        (64, _wide(128, 64, 8, 3)),
        (128, _wide(128, 32, 8, 3)),
        (256, _wide(64, 32, 8, 2)),
    ),
    ("sm_120", "narrow"): (
        (64, _narrow(16, 64, 4, 3, residency=2)),
        (128, _narrow(16, 32, 4, 3, residency=2)),
        (256, _narrow(16, 32, 4, 2, residency=2)),
    ),
    ("gfx9", "wide"): (
        (128, _wide(128, 32, 8, 2, matrix_instr_nonkdim=16)),
        (256, _wide(64, 32, 8, 2, matrix_instr_nonkdim=16)),
    ),
    ("gfx9", "narrow"): (
        (128, _narrow(16, 64, 2, 2, residency=2)),
        (256, _narrow(16, 32, 2, 2, residency=2)),
    ),
    # 160 KiB a processor, and products over twice the depth; at head size 128, 64 keys spill seven
    # registers under a window, a softcap and sinks
    ("gfx950", "wide"): (
        (64, _wide(128, 64, 8, 2, matrix_instr_nonkdim=16)),
        (128, _wide(128, 32, 8, 2, matrix_instr_nonkdim=16)),
        (256, _wide(64, 32, 8, 2, matrix_instr_nonkdim=16)),
    ),
    ("gfx950", "narrow"): (
        (128, _narrow(16, 64, 2, 2)),
        (256, _narrow(16, 32, 2, 2)),
    ),
    # small, for whatever else Triton compiles for, and for devices of too little shared memory
    ("other", "wide"): ((128, _wide(64, 32, 4, 2)), (256, _wide(32, 16, 4, 2))),
    ("other", "narrow"): (
        (128, _narrow(16, 32, 4, 2)),
        (256, _narrow(16, 16, 4, 2)),
    ),
    # small enough for small cases to cross the edges of tiles
    ("interpreter", "wide"): ((256, _wide(32, 32)),),
    ("interpreter", "narrow"): ((256, _narrow(16, 32)),),
}
# products of fp32 run on the plain units: their instructions are what costs, and their code size
_FP32_TILES: dict[str, tuple[tuple[int, Tile], ...]] = {
    "wide": ((128, Tile(32, 32, 8, 2)), (256, Tile(16, 16, 4, 2))),
    "narrow": (
        (128, _narrow(16, 32, 8, 2, residency=2)),
        (256, _narrow(16, 16, 4, 2, residency=2)),
    ),
}
_CUDA_CLASSES = {
    **dict.fromkeys((80, 87), "sm_80"),
    90: "sm_90",
    **dict.fromkeys((100, 103), "sm_100"),
    **dict.fromkeys((86, 89, 120, 121), "sm_120"),
}


def list_rows(name: str, kind: str, element_size: int) -> tuple[tuple[int, Tile], ...]:
    """The rows of the table for a device class and kind: (largest head size, tile), ascending."""
    if element_size > 2 and name != "interpreter":
        return _FP32_TILES[kind]
    return _TILES.get((name, kind), _TILES["other", kind])


# every launch asks, and the answer takes tens of microseconds to find
@lru_cache(maxsize=256)
def choose_tile(
    name: str, kind: str, element_size: int, dim: int, q_per_kv: int, shared: int | None = None
) -> Tile:
    """The tile of a device class for a "wide" or "narrow" launch; dim is the larger head size.

    q_per_kv is the number of query heads that share a key-value head: a narrow tile holds all of
    them where registers allow, so that keys are read once. shared is `DeviceFacts.shared`: the
    first row that fits it is taken, those of larger head sizes and of other devices included.
    Raises ValueError for a head size that no row serves, and if no row fits.
    """
    table = list_rows(name, kind, element_size)
    smaller = list_rows("other", kind, element_size) if name != "interpreter" else ()
    rows = [tile for largest, tile in (*table, *smaller) if dim <= largest]
    if not rows:
        raise ValueError(f"query: expected head sizes of at most {table[-1][0]}, got {dim}")
    tiles = [_hold_heads(tile, dim, q_per_kv) if kind == "narrow" else tile for tile in rows]
    if shared is None:
        return tiles[0]
    needs = [shared_need(name, tile, element_size, dim) for tile in tiles]
    fitting = (tile for tile, need in zip(tiles, needs, strict=True) if need <= shared)
    tile = next(fitting, None)
    if tile is None:
        raise ValueError(
            f"device {name}: expected at least {min(needs)} bytes of shared memory a program for "
            f"head size {dim}, got {shared}"
        )
    return tile


def shared_need(name: str, tile: Tile, element_size: int, dim: int) -> int:
    """Bytes of shared memory that no program of this tile exceeds; dim is the larger head size.

    The queries of the tile, its weights on their way from scores to operand, and the keys and
    values of the tiles that the pipeline holds: `stages` where matrix units read them from shared
    memory while the loop runs on (sm_90, sm_100), one less where a warp takes them into registers
    first. AMD takes the queries into registers, so that keys and values replace them. What else a
    program puts there (an output tile, the partial maxima of its warps, barriers) is smaller or
    replaces these; 8 bytes a row and warp and 2 KiB are counted for it. The compile gate compares
    this bound with what each row takes.
    """
    width = max(16, 1 << (dim - 1).bit_length())
    is_asynchronous = element_size <= 2 and name in ("sm_90", "sm_100")
    buffers = tile.stages if is_asynchronous else max(1, tile.stages - 1)
    query, pipeline = tile.rows * width, buffers * tile.keys * 2 * width
    tiles = max(query, pipeline) if name.startswith("gfx") else query + pipeline
    return (tiles + tile.rows * tile.keys) * element_size + 8 * tile.rows * tile.warps + 2048


def choose_splits(processors: int, work: int, residency: int = DECODE_RESIDENCY) -> int:
    """The most parts that a decoding sequence is cut into, from static shapes alone.

    residency is that of the tile; work counts (sequence, head block) pairs. Few of them: as many
    parts as fill the device once, in one wave. Many: eight waves of parts, so that the last wave
    and a sequence longer than the others cost little.
    """
    capacity = processors * residency
    splits = capacity // work if 2 * work <= capacity else -(-8 * capacity // work)
    return max(1, min(splits, MAX_SPLITS))


@lru_cache(maxsize=64)
def read_device(kind: str, index: int | None) -> DeviceFacts:
    """The facts of a torch device; a CPU means the interpreter."""
    import torch

    if kind == "cpu":
        return DeviceFacts("interpreter", 4)
    properties = torch.get_device_module(kind).get_device_properties(index or 0)
    return describe_device(kind, properties, is_hip=torch.version.hip is not None)


def describe_device(kind: str, properties: Any, is_hip: bool) -> DeviceFacts:
    """The facts that torch's properties of an accelerator of type `kind` tell."""
    if kind == "xpu":
        local = getattr(properties, "local_mem_size", None)
        return DeviceFacts("other", properties.max_compute_units, local or None)
    # the most that a program can ask for; some devices and versions only say what it gets unasked
    names = "shared_memory_per_block_optin", "shared_memory_per_block"
    shared = max(getattr(properties, name, 0) for name in names) or None
    if is_hip:
        arch = properties.gcnArchName.split(":")[0]
        name = "gfx950" if arch == "gfx950" else "gfx9" if arch.startswith("gfx9") else "other"
    else:
        name = _CUDA_CLASSES.get(10 * properties.major + properties.minor, "other")
    return DeviceFacts(name, properties.multi_processor_count, shared)


def _hold_heads(tile: Tile, dim: int, q_per_kv: int) -> Tile:
    rows = min(1 << (q_per_kv - 1).bit_length(), 64 if dim <= 128 else 32)
    return replace(tile, rows=max(tile.rows, rows))
