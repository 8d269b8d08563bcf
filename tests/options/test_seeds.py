"""Seeds: what a run draws, and that no two requests of it share one."""

import pytest
import torch

from tcb.options.seeds import _splitmix, draw_base_seed, request_seed


def test_a_given_seed_is_the_base_seed():
    assert draw_base_seed(11) == 11
    assert draw_base_seed(2**64 - 1) == -1
    with pytest.raises(ValueError, match=r"seed is 1\.5"):
        draw_base_seed(1.5)


def test_drawn_base_seeds_differ_and_follow_the_random_state(monkeypatch):
    def drawn(seed):
        monkeypatch.setattr("tcb.options.seeds._calls", iter(range(9)))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return [draw_base_seed(None) for _ in range(3)]

    assert drawn(0) == drawn(0)
    assert len({*drawn(0), *drawn(1)}) == 6


def test_request_seeds_use_every_bit_and_collide_nowhere():
    seeds = {
        request_seed(base, ordinal, child)
        for base in (0, 1, -1, 2**62)
        for ordinal in range(100)
        for child in range(5)
    }
    assert len(seeds) == 4 * 100 * 5
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    for bit in range(64):
        ones = sum(seed >> bit & 1 for seed in seeds)
        # 2000 fair bits: 1000, standard deviation 22; 5 of them are passed once in 2 million
        assert abs(ones - 1000) < 5 * 22.4


def test_request_seeds_are_made_of_splitmix64():
    # the first output of the published generator from state 0
    assert _splitmix(0) == 0xE220A8397B1DCDAF
