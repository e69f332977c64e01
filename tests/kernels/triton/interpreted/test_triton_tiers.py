"""Copies between a cache and its lower tier."""

from __future__ import annotations

import torch
from interpreter import interpreted_backend, sanitizer

from kernels.api import KVCacheSpec


def test_blocks_go_to_the_host_and_back() -> None:
    backend = interpreted_backend()
    spec = KVCacheSpec(2, 5, 16, 2, 64, torch.float8_e4m3fn)
    cache, host = backend.allocate_kv_cache(spec), backend.allocate_host_kv_cache(spec)
    blocks = torch.randn(2, 5, 2, 16, 64, generator=torch.Generator().manual_seed(2)).to(spec.dtype)
    for layer in range(2):
        backend.import_blocks(cache, layer, range(5), blocks)
    with sanitizer():
        backend.copy_blocks(cache, [4, 1], host, [0, 2])
        backend.copy_blocks(host, [0, 2], cache, [3, 4])
    for layer in range(2):
        back = backend.export_blocks(cache, layer, [3, 4]).view(torch.uint8)
        assert torch.equal(back, blocks[:, [4, 1]].view(torch.uint8))
