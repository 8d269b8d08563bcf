"""Blocks are copied bit by bit, within the pool, out of it and back."""

import pytest
import torch

from tcb import kernels
from tcb.kernels import copy_blocks, gather_blocks, scatter_blocks
from tcb.kernels.cpu import operations as torch_ops
from tests.support.oracle import spread


@pytest.fixture(params=[kernels, torch_ops], ids=["triton", "torch"])
def copying(request):
    return request.param


def blocks(*ids, device="cpu"):
    return torch.tensor(ids, dtype=torch.int64, device=device)


def pool(elements, dtype, device, count=7):
    """Random bits: NaN and Inf among them."""
    bits = torch.randint(0, 256, (count, elements * dtype.itemsize), dtype=torch.uint8)
    return bits.view(dtype).to(device)


def same_bits(left, right):
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


SIZES = [1, 96, 2048, 2049, 10_000]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]


@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copy(copying, elements, dtype, device):
    cache = pool(elements, dtype, device)
    wanted = cache.clone()
    wanted[[1, 3, 6]] = cache[[0, 0, 5]]
    sources, targets = blocks(0, 2, 0, 5, device=device), blocks(1, 2, 3, 6, device=device)
    copying.copy_blocks(cache, sources, targets)
    assert same_bits(cache, wanted)


@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_then_scatter(copying, elements, dtype, device):
    cache = pool(elements, dtype, device)
    out = pool(elements, dtype, device, count=3)
    copying.gather_blocks(cache, blocks(6, 0, 3, device=device), out)
    assert same_bits(out, cache[[6, 0, 3]])
    wanted = cache.clone()
    wanted[[2, 6, 1]] = out
    copying.scatter_blocks(out, cache, blocks(2, 6, 1, device=device))
    assert same_bits(cache, wanted)


def test_rows_of_a_wider_tensor(copying, device):
    wide = pool(200, torch.float32, device)
    before, cache = wide.clone(), wide[:, 3:103]
    copying.copy_blocks(cache, blocks(4, device=device), blocks(5, device=device))
    before[5, 3:103] = before[4, 3:103]
    assert same_bits(wide, before)


def test_no_block(copying, device):
    cache, none = pool(10, torch.float32, device), blocks(device=device)
    before = cache.clone()
    copying.copy_blocks(cache, none, none)
    copying.gather_blocks(cache, none, cache[:0].clone())
    copying.scatter_blocks(cache[:0].clone(), cache, none)
    assert same_bits(cache, before)


def test_offsets_beyond_int32(copying, device):
    cache = spread(pool(40, torch.float16, device), 0, 2**30)
    before = cache.clone()
    copying.copy_blocks(cache, blocks(6, device=device), blocks(5, device=device))
    assert same_bits(cache[5], before[6])
    out = spread(before[:3], 0, 2**30)
    copying.gather_blocks(cache, blocks(4, 6, 3, device=device), out)
    assert same_bits(out, before[[4, 6, 3]])
    copying.scatter_blocks(out, cache, blocks(0, 1, 6, device=device))
    assert same_bits(cache[[0, 1, 6]], before[[4, 6, 3]])


def test_a_block_that_is_read_and_written_is_a_broken_promise():
    with pytest.raises(AssertionError, match="read and written"):
        torch_ops.copy_blocks(torch.zeros(4, 2), blocks(0, 1), blocks(1, 2))
    with pytest.raises(AssertionError, match="written twice"):
        torch_ops.copy_blocks(torch.zeros(4, 2), blocks(0, 1), blocks(3, 3))


CACHE, IDS = torch.zeros(4, 6), blocks(0, 1)
WRONG = {
    "cache": lambda: copy_blocks(CACHE[0], IDS, IDS),
    "cache stride": lambda: copy_blocks(CACHE.T, IDS, IDS),
    "source": lambda: copy_blocks(CACHE, IDS.int(), IDS),
    "target": lambda: copy_blocks(CACHE, IDS, IDS[:1]),
    "target device": lambda: copy_blocks(CACHE, IDS, IDS.to("meta")),
    "block": lambda: gather_blocks(CACHE, IDS[None], CACHE[:2]),
    "out": lambda: gather_blocks(CACHE, IDS, CACHE[:3]),
    "out dtype": lambda: gather_blocks(CACHE, IDS, CACHE[:2].half()),
    "data": lambda: scatter_blocks(CACHE[:2, :5], CACHE, IDS),
    "data stride": lambda: scatter_blocks(torch.zeros(6, 2).T, CACHE, IDS),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_tensor_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match=f"^{wrong.split()[0]}:"):
        WRONG[wrong]()
