"""`write_kv` puts every token where its slot says, and changes nothing else."""

import pytest
import torch

from tcb.kernels import write_kv
from tcb.kernels.cpu import operations as torch_ops
from tests.support.oracle import spread

SLOTS = [0, 5, -1, 79, 17, 33, 48, -7, 16]


@pytest.fixture(params=[write_kv, torch_ops.write_kv], ids=["triton", "torch"])
def write(request):
    return request.param


def caches(layout, heads, dim, value_dim, dtype, device, page_size=16):
    """Both caches [5, page_size, heads, ...] full of -1."""
    shape = 5, page_size, heads

    def full(*size):
        return torch.full(size, -1.0, dtype=dtype, device=device)

    match layout:
        case "apart":
            return full(*shape, dim), full(*shape, value_dim)
        case "one pool":
            pool = full(5, 3, page_size * heads * (dim + value_dim))[:, 1]
            keys, values = pool.split([page_size * heads * d for d in (dim, value_dim)], 1)
            return keys.view(*shape, dim), values.view(*shape, value_dim)
        case "head major":
            size = 5, heads, page_size
            return full(*size, dim).transpose(1, 2), full(*size, value_dim).transpose(1, 2)
        case "beside each other":
            return full(*shape, dim + 1 + value_dim).split([dim, 1, value_dim], 3)[::2]


def expected(new, cache, slots):
    """The cache after the write, token by token."""
    cache, page_size = cache.clone(), cache.shape[1]
    for token, slot in enumerate(slots):
        if slot >= 0:
            cache[slot // page_size, slot % page_size] = new[token]
    return cache


def check(write, new, both, slots):
    """Write, and compare both caches as a whole."""
    after = [expected(*pair, slots) for pair in zip(new, both, strict=True)]
    write(*new, *both, torch.tensor(slots, dtype=torch.int64, device=new[0].device))
    for cache, wanted in zip(both, after, strict=True):
        assert torch.equal(cache, wanted)


@pytest.mark.parametrize("layout", ["apart", "one pool", "head major", "beside each other"])
@pytest.mark.parametrize(
    ("heads", "dim", "value_dim"),
    [(1, 16, 16), (3, 64, 64), (3, 80, 48), (40, 128, 128), (2, 7, 300)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_token_is_where_its_slot_says(write, layout, heads, dim, value_dim, dtype, device):
    both = caches(layout, heads, dim, value_dim, dtype, device)
    new = torch.randn(len(SLOTS), heads, dim + value_dim, dtype=dtype, device=device)
    check(write, new.split([dim, value_dim], 2), both, SLOTS)


@pytest.mark.parametrize("page_size", [1, 12, 256])
def test_any_page_size(write, page_size, device):
    both = caches("one pool", 2, 16, 16, torch.float32, device, page_size)
    slots = [5 * page_size - 1, 0, 2 * page_size]
    check(write, torch.randn(2, 3, 2, 16, device=device), both, slots)


def test_slices_of_one_projection(write, device):
    heads_first = torch.randn(8, len(SLOTS), 32, device=device)
    new = heads_first.transpose(0, 1).split([4, 2, 2], 1)[1:]
    check(write, new, caches("apart", 2, 32, 32, torch.float32, device), SLOTS)


def test_values_are_cast_to_the_cache(write, device):
    new = torch.randn(2, len(SLOTS), 2, 16, device=device)
    check(write, new, caches("apart", 2, 16, 16, torch.float16, device), SLOTS)


@pytest.mark.parametrize("slots", [[], [-1, -1]], ids=["no token", "padding only"])
def test_nothing_to_write(write, slots, device):
    new = torch.randn(2, len(slots), 2, 16, device=device)
    check(write, new, caches("apart", 2, 16, 16, torch.float32, device), slots)


def test_slots_are_read_at_every_call(write, device):
    # one tensor of slots, rewritten behind torch's back
    slot = torch.tensor([3, 4], device=device)
    new = torch.randn(2, 2, 2, 16, device=device)
    both = caches("apart", 2, 16, 16, torch.float32, device)
    write(*new, *both, slot)
    slot.data.copy_(torch.tensor([-1, 70]))
    after = [expected(*pair, [-1, 70]) for pair in zip(new, both, strict=True)]
    write(*new, *both, slot)
    for cache, wanted in zip(both, after, strict=True):
        assert torch.equal(cache, wanted)


def test_offsets_beyond_int32(write, device):
    dtype = torch.float16
    both = [spread(cache, 0, 2**30) for cache in caches("apart", 2, 16, 16, dtype, device)]
    new = [spread(torch.randn(9, 2, 16).to(dtype).to(device), 0, 2**29) for _ in range(2)]
    write(*new, *both, torch.tensor(SLOTS, device=device))
    for cache, tokens in zip(both, new, strict=True):
        for token, slot in enumerate(SLOTS):
            if slot >= 0:
                assert torch.equal(cache[slot // 16, slot % 16], tokens[token])


KEY, CACHE, SLOT = torch.zeros(2, 3, 16), torch.zeros(4, 8, 3, 16), torch.zeros(2).long()
WRONG = {
    "key": (KEY[0], KEY, CACHE, CACHE, SLOT),
    "key stride": (torch.zeros(2, 16, 3).mT, KEY, CACHE, CACHE, SLOT),
    "value": (KEY, KEY[:, :2], CACHE, CACHE, SLOT),
    "value dtype": (KEY, KEY.half(), CACHE, CACHE, SLOT),
    "value device": (KEY, KEY.to("meta"), CACHE, CACHE, SLOT),
    "key_cache": (KEY, KEY, CACHE[..., :8], CACHE, SLOT),
    "key_cache pages": (KEY, KEY, CACHE[:, :4], CACHE, SLOT),
    "value_cache": (KEY, KEY, CACHE, CACHE[0], SLOT),
    "value_cache dtype": (KEY, KEY, CACHE, CACHE.half(), SLOT),
    "slot": (KEY, KEY, CACHE, CACHE, SLOT[:1]),
    "slot dtype": (KEY, KEY, CACHE, CACHE, SLOT.int()),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_tensor_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match=f"^{wrong.split()[0]}:"):
        write_kv(*WRONG[wrong])
