"""Pages of a KV cache are there before its blocks are used, a few at a time."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys

import pytest
import torch
from kernel_steps import ragged_batch

from kernels.api import KVCacheSpec
from kernels.cpu import CpuBackend
from kernels.cpu.cache import CpuCache, allocate
from kernels.cpu.extension import unavailable_reason

pytestmark = [
    pytest.mark.skipif(unavailable_reason() is not None, reason="the C++ kernels are not built"),
    pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which pages are there"),
]

LAYERS, BLOCK = 8, 16
# Blocks of 128 KiB a layer: a stripe of 2 MiB holds 16.
SPEC = KVCacheSpec(LAYERS, 80, BLOCK, 8, 128, torch.float32)
STRIPE = 16


def resident_blocks(cache: CpuCache, layer: int) -> list[int]:
    """Blocks of a layer all of whose pages are there (mincore)."""
    block_bytes = cache.data.stride(1) * cache.data.element_size()
    pages = (ctypes.c_ubyte * (block_bytes // mmap.PAGESIZE - 1))()
    found = []
    for block in range(cache.spec.num_blocks):
        # Pages that lie in the block alone, wherever it begins.
        begin = -(-cache.data[layer, block].data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = len(pages) * mmap.PAGESIZE
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(size), pages) == 0
        if all(page & 1 for page in pages):
            found.append(block)
    return found


def reached(cache: CpuCache, *blocks: int) -> list[int]:
    """Blocks that are ready after each of these is reached."""
    found = []
    for block in blocks:
        cache.pages.reach(block)
        found.append(cache.pages.num_ready_blocks)
    if found[0] == 0:
        pytest.skip("this system makes no pages ready when asked (Linux before 5.14)")
    return found


def test_pages_of_a_stripe_are_there_once_it_begins_and_those_of_the_next_when_it_ends() -> None:
    cache = allocate(SPEC)
    assert reached(cache, 0, STRIPE - 2, STRIPE - 1) == [STRIPE, STRIPE, 2 * STRIPE]
    assert reached(cache, 0, 2 * STRIPE, 79) == [2 * STRIPE, 3 * STRIPE, 80]
    assert set(range(3 * STRIPE)) | set(range(4 * STRIPE, 80)) <= set(resident_blocks(cache, LAYERS - 1))


def test_each_block_brings_its_share_of_the_next_pages() -> None:
    cache = allocate(SPEC)
    reached(cache, 0)
    num_present = [sum(len(resident_blocks(cache, layer)) for layer in range(LAYERS))]
    for block in range(1, STRIPE):
        cache.pages.reach(block)
        num_present.append(sum(len(resident_blocks(cache, layer)) for layer in range(LAYERS)))
    assert num_present[-1] >= 2 * STRIPE * LAYERS
    growth = [after - before for before, after in itertools.pairwise(num_present)]
    assert max(growth) <= 2 * STRIPE + 2  # one layer's piece, which may lie in two huge pages


def test_what_lies_further_ahead_and_what_was_passed_over_takes_no_memory() -> None:
    cache = allocate(SPEC)
    reached(cache, 0, 3 * STRIPE)
    for layer in range(LAYERS):
        present = set(resident_blocks(cache, layer))
        assert {*range(STRIPE), *range(3 * STRIPE, 4 * STRIPE)} <= present
        assert len(present) <= 4 * STRIPE + 2  # a huge page may begin before its stripe and end after it


def test_a_plan_tells_how_far_the_cache_is_used_and_what_is_in_it_stays() -> None:
    backend, cache = CpuBackend(1), allocate(SPEC)
    cache.data[:, :STRIPE] = 1.0
    backend.plan_attention(ragged_batch([(1, BLOCK + 1, [3, STRIPE - 1])]), cache)
    assert reached(cache, 0) == [2 * STRIPE]
    assert cache.data[:, :STRIPE].eq(1.0).all()
    assert cache.data[:, STRIPE:].eq(0.0).all()


def test_a_small_cache_asks_for_nothing() -> None:
    cache = allocate(KVCacheSpec(LAYERS, STRIPE, BLOCK, 8, 128, torch.float32))
    cache.pages.reach(STRIPE - 1)
    assert resident_blocks(cache, 0) == []
