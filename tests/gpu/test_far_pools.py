"""Pools with blocks beyond 2^31 and, where memory allows, 2^32 elements: the same bits as near."""

from dataclasses import replace

import torch

from bench.lib import machine
from tcb.kernels import copy_blocks, gather_blocks, scatter_blocks, write_kv
from tests.gpu.checking import BRAIN, HALF, attend, need, sized
from tests.support.oracle import Case, assert_close, build, spread


@sized("bits decode", [(b, d) for b in (31, 32) for d in (False, True)], [(20, False), (20, True)])
def test_attention_reads_blocks_far_away(bits, decode, small, device, saw):
    shape = {"heads": 8, "kv_heads": 4, "dim": 128, "page_size": 64, "dtype": HALF}
    lengths = ((200, 0), (0, 0), (77, 0)) if decode else ((130, 20), (70, 1), (0, 9))
    case = Case(lengths, decode=decode, **shape)
    near = build(case, device)
    blocks, *block = near.key_cache.shape
    count = 2**bits // near.key_cache[0].numel() + blocks
    need(2 * count * near.key_cache[0].nbytes, device)
    caches = []
    for cache in (near.key_cache, near.value_cache):
        caches.append(torch.empty(count, *block, dtype=HALF, device=device))
        caches[-1][-blocks:] = cache
    table = torch.where(near.block_table < 0, -1, near.block_table + count - blocks)
    far = replace(near, key_cache=caches[0], value_cache=caches[1], block_table=table)
    expected, out = attend(near, case), attend(far, case)
    machine.synchronize(device)
    assert_close(expected, near)
    assert torch.equal(out, expected), "blocks far away gave other bits"
    saw(elements=caches[0].numel())


@sized("bits", [(31,), (32,)], [(20,)])
def test_blocks_are_written_and_moved_at_the_far_end(bits, small, device, saw):
    page, heads, dim = 64, 4, 128
    elements = page * heads * dim
    count = 2**bits // elements + 3
    need(1.2 * count * elements * 2, device)
    pool = torch.empty(count, elements, dtype=BRAIN, device=device)
    pool[:4], pool[-3:] = 1.0, 2.0
    key, value = torch.randn(2, 2, heads, dim, device=device).to(BRAIN)
    cache = pool.view(count, page, heads, dim)
    slot = torch.tensor([(count - 1) * page + 5, (count - 2) * page], device=device)
    write_kv(key, key, cache, cache, slot)
    assert torch.equal(cache[-1, 5], key[0]) and torch.equal(cache[-2, 0], key[1])
    write_kv(value, value, cache, cache, slot)
    assert torch.equal(cache[-1, 5], value[0])
    far = torch.tensor([count - 1, count - 2], device=device)
    near = torch.tensor([1, 2], device=device)
    copy_blocks(pool, far, near)
    assert torch.equal(pool[1], pool[-1]) and torch.equal(pool[2], pool[-2])
    taken = torch.empty(2, elements, dtype=BRAIN, device=device)
    gather_blocks(pool, far, taken)
    assert torch.equal(taken[0], pool[-1])
    scatter_blocks(taken.flip(0).contiguous(), pool, far)
    assert torch.equal(pool[-2], taken[0]) and torch.equal(pool[-1], taken[1])
    assert (pool[0] == 1).all() and (pool[3] == 1).all(), "blocks nearby were written"
    assert (pool[-3] == 2).all(), "a block beside was written"
    saw(elements=pool.numel())


@sized("bits", [(31,)], [(17,)])
def test_attention_reads_tokens_far_apart(bits, small, device, saw):
    # 42 tokens: 32 and more of these strides
    stride = 2 ** (bits - 5)
    case = Case(((20, 30), (5, 12)), heads=4, kv_heads=2, dim=64, dtype=HALF)
    near = build(case, device)
    tokens = near.query.shape[0]
    need(1.2 * 4 * tokens * stride * 2, device)
    names = "query", "key", "value"
    far = replace(near, **{name: spread(getattr(near, name), 0, stride) for name in names})
    out = attend(far, case, out=spread(torch.full_like(near.query, float("nan")), 0, stride))
    machine.synchronize(device)
    assert_close(out, near)
    saw(elements=tokens * stride)
