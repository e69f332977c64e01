"""The host tier at start: what is refused, in words that name --swap-space."""

from __future__ import annotations

import pytest
import torch

from kernels.api import KVCache, KVCacheSpec
from kernels.reference import ReferenceBackend
from octavo.process import StartError
from worker_svc.caches import allocate_host_cache
from worker_svc.config import WorkerConfig
from worker_svc.parallel.group import ALONE

SPEC = KVCacheSpec(num_layers=2, num_blocks=4, block_size=16, num_kv_heads=2, head_dim=64, dtype=torch.float32)


class NoRoom(ReferenceBackend):
    """Of a machine that gives no memory, however much it says is free."""

    def allocate_kv_cache(self, spec: KVCacheSpec) -> KVCache:
        raise MemoryError(f"{spec.num_blocks} blocks cannot be pinned: out of memory")


def cache() -> KVCache:
    return ReferenceBackend().allocate_kv_cache(SPEC)


def test_memory_that_is_free_and_cannot_be_had_ends_the_start() -> None:
    config = WorkerConfig(swap_space=1 / 1024)
    with pytest.raises(StartError, match=r"--swap-space 0\.000976562: 32 blocks cannot be pinned.*; use less"):
        allocate_host_cache(config, NoRoom(), cache(), ALONE)


@pytest.mark.parametrize("swap_space", [1e-9, 2.0**20])
def test_less_than_a_block_and_more_than_is_free_are_refused(swap_space: float) -> None:
    with pytest.raises(StartError, match=r"--swap-space .*: a block takes 32\.00 KiB and .* are free"):
        allocate_host_cache(WorkerConfig(swap_space=swap_space), ReferenceBackend(), cache(), ALONE)


def test_a_size_between_the_two_holds_as_many_blocks() -> None:
    assert allocate_host_cache(WorkerConfig(), ReferenceBackend(), cache(), ALONE) is None
    tier = allocate_host_cache(WorkerConfig(swap_space=1 / 1024), ReferenceBackend(), cache(), ALONE)
    assert tier is not None
    assert tier.spec.num_blocks == 2**20 // (32 * 1024)
