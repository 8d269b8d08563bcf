"""The tile table as a specification, and the number of parts of a decode."""

import pytest

from tcb.kernels.tuning import DECODE_RESIDENCY, MAX_SPLITS, choose_splits, choose_tile

DEVICES = ("sm_80", "sm_90", "sm_100", "gfx9", "other", "interpreter", "not heard of")
POWERS = {16, 32, 64, 128}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["wide", "narrow"])
@pytest.mark.parametrize("element_size", [2, 4])
def test_every_head_size_has_a_tile(device, kind, element_size):
    for dim in range(1, 257):
        tile = choose_tile(device, kind, element_size, dim, group=4)
        assert {tile.rows, tile.keys} <= POWERS, (dim, tile)


@pytest.mark.parametrize("dim", [257, 512])
def test_a_head_size_beyond_the_table_is_refused(dim):
    with pytest.raises(ValueError, match=r"at most 256, got"):
        choose_tile("sm_90", "wide", 2, dim, group=1)


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
        tile = choose_tile("sm_90", "wide", 2, dim, group=4)
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
