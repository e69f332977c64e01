"""KV blocks: zeroed allocation, copies within and between caches, the canonical layout, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.api import Backend, KVCache, KVCacheSpec

SPEC = KVCacheSpec(num_layers=2, num_blocks=6, block_size=8, num_kv_heads=3, head_dim=64, dtype=torch.float32)


def filled(backend: Backend, spec: KVCacheSpec) -> tuple[KVCache, list[Tensor]]:
    """A cache with random content, and that content per layer in the canonical layout."""
    cache = backend.allocate_kv_cache(spec)
    shape = (2, spec.num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
    content = [torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(spec.dtype) for i in range(2)]
    for layer, blocks in enumerate(content):
        backend.import_blocks(cache, layer, range(spec.num_blocks), blocks)
    return cache, content


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_export_gives_back_what_was_imported(backend: Backend, dtype: torch.dtype, block_size: int) -> None:
    cache, content = filled(backend, replace(SPEC, dtype=dtype, block_size=block_size))
    for layer, blocks in enumerate(content):
        exported = backend.export_blocks(cache, layer, [4, 0])
        assert torch.equal(exported, blocks[:, [4, 0]])
        exported.zero_()
        assert torch.equal(backend.export_blocks(cache, layer, [4]), blocks[:, [4]])


def test_a_new_cache_is_zero(backend: Backend) -> None:
    cache = backend.allocate_kv_cache(SPEC)
    assert cache.spec == SPEC
    assert not backend.export_blocks(cache, 1, range(6)).any()


def test_copies_take_all_layers_and_nothing_else(backend: Backend) -> None:
    cache, content = filled(backend, SPEC)
    backend.copy_blocks(cache, [0, 5], cache, [2, 3])
    for layer, blocks in enumerate(content):
        expected = blocks.clone()
        expected[:, [2, 3]] = blocks[:, [0, 5]]
        assert torch.equal(backend.export_blocks(cache, layer, range(6)), expected)


def test_copies_between_caches_of_different_size(backend: Backend) -> None:
    cache, content = filled(backend, SPEC)
    other = backend.allocate_kv_cache(replace(SPEC, num_blocks=2))
    backend.copy_blocks(cache, [5, 1], other, [0, 1])
    backend.copy_blocks(cache, [], other, [])
    for layer, blocks in enumerate(content):
        assert torch.equal(backend.export_blocks(other, layer, [0, 1]), blocks[:, [5, 1]])


def test_impossible_copies_are_refused(backend: Backend) -> None:
    cache = backend.allocate_kv_cache(SPEC)
    with pytest.raises(ValueError, match="2"):
        backend.copy_blocks(cache, [0, 1], cache, [2])
    with pytest.raises(ValueError, match="6"):
        backend.copy_blocks(cache, [0], cache, [6])
    with pytest.raises(ValueError, match="-1"):
        backend.copy_blocks(cache, [-1], cache, [0])
    other = backend.allocate_kv_cache(replace(SPEC, block_size=16))
    with pytest.raises(ValueError, match="16"):
        backend.copy_blocks(cache, [0], other, [0])


def test_a_cache_too_large_is_refused_with_its_bytes(backend: Backend) -> None:
    spec = replace(SPEC, num_blocks=10**14)
    with pytest.raises(MemoryError, match=str(spec.num_bytes)):
        backend.allocate_kv_cache(spec)
