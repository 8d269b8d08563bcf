"""Seeds: one for a run, and one for each request and fork, mixed from it.

Reads torch's random state and never advances it.
"""

import hashlib
import itertools
from operator import index
from typing import Any

import torch

from tcb.planning.rules import is_integer

_MASK_64 = 2**64 - 1
_calls = itertools.count()


def draw_base_seed(seed: Any) -> int:
    """The seed of a run, in [-2^63, 2^63): `seed` if given, else one made of torch's CPU random
    state and a call count.

    After `torch.manual_seed` a program draws the same seeds from run to run, and two calls in a row
    draw different ones. Raises ValueError for a seed that is no integer.
    """
    if seed is None:
        state = bytes(torch.random.default_generator.get_state().tolist())
        salt = next(_calls).to_bytes(8, "little")
        digest = hashlib.blake2b(state, digest_size=8, salt=salt)
        return _signed(int.from_bytes(digest.digest(), "little"))
    if not is_integer(seed):
        raise ValueError(f"seed is {seed!r}; accepted: integers")
    return _signed(index(seed))


def request_seed(base_seed: int, ordinal: int, child: int = 0) -> int:
    """The seed of one request, in [-2^63, 2^63): the base seed mixed with the request's ordinal and
    child number.

    Three rounds of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014).
    """
    mixed = 0
    for word in (base_seed, ordinal, child):
        mixed = _splitmix(mixed ^ (word & _MASK_64))
    return _signed(mixed)


def _splitmix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return state ^ (state >> 31)


def _signed(word: int) -> int:
    """The int64 that has the low 64 bits of `word`."""
    return ((word + 2**63) & _MASK_64) - 2**63
