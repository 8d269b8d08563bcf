"""The tile table as a specification, and the number of parts of a decode."""

from types import SimpleNamespace

import pytest

from tcb.kernels.gpu.tuning import (
    DECODE_RESIDENCY,
    MAX_SPLITS,
    DeviceFacts,
    choose_splits,
    choose_tile,
    describe_device,
    list_rows,
    shared_need,
)

CLASSES = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx9", "gfx950", "other")
DEVICES = (*CLASSES, "interpreter", "not heard of")
POWERS = {16, 32, 64, 128}
KIB = 1024
# what a program may have on the devices that a class is named for; "other" is as little as any
SHARED = {
    "sm_80": 163 * KIB,
    "sm_90": 227 * KIB,
    "sm_100": 227 * KIB,
    "sm_120": 99 * KIB,
    "gfx9": 64 * KIB,
    "gfx950": 160 * KIB,
    "other": 64 * KIB,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["wide", "narrow"])
@pytest.mark.parametrize("element_size", [2, 4])
def test_every_head_size_has_a_tile(device, kind, element_size):
    for dim in range(1, 257):
        tile = choose_tile(device, kind, element_size, dim, q_per_kv=4)
        assert {tile.rows, tile.keys} <= POWERS, (dim, tile)


@pytest.mark.parametrize("dim", [257, 512])
def test_a_head_size_beyond_the_table_is_refused(dim):
    with pytest.raises(ValueError, match=r"at most 256, got"):
        choose_tile("sm_90", "wide", 2, dim, q_per_kv=1)


@pytest.mark.parametrize(
    ("group", "dim", "rows"),
    [
        *((group, 128, 16) for group in (1, 5, 16)),
        *((17, 128, 32), (33, 128, 64), (71, 128, 64)),
        *((group, 256, 32) for group in (17, 64)),
    ],
)
def test_a_narrow_tile_holds_the_heads_that_share_keys(group, dim, rows):
    assert choose_tile("sm_90", "narrow", 2, dim, group).rows == rows


def test_wide_tiles_of_hopper_fill_its_warp_groups():
    for dim in (64, 80, 96, 112, 128, 192, 256):
        tile = choose_tile("sm_90", "wide", 2, dim, q_per_kv=4)
        assert tile.rows >= 64 * tile.warps // 4, dim


@pytest.mark.parametrize("work", [1, 8, 64, 198, 199, 512, 5000, 10**6])
def test_splits_fill_the_device_and_stay_in_bounds(work):
    splits = choose_splits(132, work)
    capacity = 132 * DECODE_RESIDENCY
    assert 1 <= splits <= MAX_SPLITS
    if 2 * work <= capacity:
        assert splits == MAX_SPLITS or capacity - work < splits * work <= capacity
    else:
        assert splits * work >= 8 * capacity


@pytest.mark.parametrize("device", CLASSES)
@pytest.mark.parametrize("kind", ["wide", "narrow"])
@pytest.mark.parametrize("element_size", [2, 4])
def test_a_device_takes_the_first_row_of_its_class(device, kind, element_size):
    rows = list_rows(device, kind, element_size)
    assert [largest for largest, _ in rows] == sorted({largest for largest, _ in rows})
    for largest, tile in rows:
        assert choose_tile(device, kind, element_size, largest, 4, SHARED[device]) == tile
        assert choose_tile(device, kind, element_size, largest, 4) == tile


@pytest.mark.parametrize("kind", ["wide", "narrow"])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 32])
@pytest.mark.parametrize("element_size", [2, 4])
def test_less_shared_memory_gets_a_smaller_tile_or_an_error(kind, dim, group, element_size):
    """Walk down byte by byte at the borders: the tile always fits, and shrinks until none does."""
    shared, needs = 227 * KIB, []
    while True:
        try:
            tile = choose_tile("sm_90", kind, element_size, dim, group, shared)
        except ValueError as error:
            text = str(error)
            break
        needs.append(shared_need("sm_90", tile, element_size, dim))
        assert needs[-1] <= shared
        shared = needs[-1] - 1
    assert needs == sorted(set(needs), reverse=True)
    assert needs, "a device of 227 KiB has a tile"
    expected = f"device sm_90: expected at least {needs[-1]} bytes of shared memory"
    assert text.startswith(expected) and f"head size {dim}" in text
    assert text.endswith(f"got {shared}")


def test_the_smaller_row_is_one_of_the_table():
    full = choose_tile("sm_90", "wide", 2, 64, 4, 227 * KIB)
    half = choose_tile("sm_90", "wide", 2, 64, 4, 64 * KIB)
    assert half != full
    rows = [tile for name in ("sm_90", "other") for _, tile in list_rows(name, "wide", 2)]
    assert half in rows


@pytest.mark.parametrize("device", CLASSES)
@pytest.mark.parametrize("element_size", [2, 4])
def test_every_device_of_48_kib_can_serve_common_heads(device, element_size):
    """The least that any device of the last ten years gives a program without being asked."""
    for kind in ("wide", "narrow"):
        for dim in (64, 128):
            tile = choose_tile(device, kind, element_size, dim, 4, 48 * KIB)
            assert shared_need(device, tile, element_size, dim) <= 48 * KIB


@pytest.mark.parametrize(
    ("kind", "properties", "is_hip", "facts"),
    [
        (
            "cuda",
            {"major": 9, "minor": 0, "shared_memory_per_block_optin": 232448},
            False,
            ("sm_90", 132, 232448),
        ),
        (
            "cuda",
            {
                "major": 8,
                "minor": 6,
                "shared_memory_per_block": 49152,
                "shared_memory_per_block_optin": 101376,
            },
            False,
            ("sm_120", 132, 101376),
        ),
        ("cuda", {"major": 12, "minor": 0}, False, ("sm_120", 132, None)),
        ("cuda", {"major": 8, "minor": 7}, False, ("sm_80", 132, None)),
        ("cuda", {"major": 10, "minor": 3}, False, ("sm_100", 132, None)),
        (
            "cuda",
            {"major": 7, "minor": 5, "shared_memory_per_block": 49152},
            False,
            ("other", 132, 49152),
        ),
        (
            "cuda",
            {
                "gcnArchName": "gfx942:sramecc+:xnack-",
                "shared_memory_per_block": 65536,
                "shared_memory_per_block_optin": 0,
            },
            True,
            ("gfx9", 132, 65536),
        ),
        ("cuda", {"gcnArchName": "gfx950:sramecc+:xnack-"}, True, ("gfx950", 132, None)),
        ("cuda", {"gcnArchName": "gfx1100"}, True, ("other", 132, None)),
        ("xpu", {"max_compute_units": 64, "local_mem_size": 131072}, False, ("other", 64, 131072)),
        ("xpu", {"max_compute_units": 64}, False, ("other", 64, None)),
    ],
)
def test_what_torch_says_of_a_device_becomes_its_facts(kind, properties, is_hip, facts):
    told = SimpleNamespace(**{"multi_processor_count": 132, **properties})
    assert describe_device(kind, told, is_hip) == DeviceFacts(*facts)


# one program a processor is no full wave, so eight waves are cut
@pytest.mark.parametrize(("residency", "splits"), [(1, 8), (2, 2), (3, 3)])
def test_splits_count_on_the_residency_of_the_tile(residency, splits):
    assert choose_splits(100, 100, residency) == splits
