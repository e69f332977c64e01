"""Allocates the KV cache of the device tier and of the host tier, in sizes that all ranks of the replica can hold.

A block id means the same block on every rank, so each tier has as many blocks as the rank with the least room. Knows
memory and the group; must not know what the blocks are for.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from kernels.api import Backend, HostTier, KVCache, KVCacheSpec
from octavo.machine import MachineFacts, collect_machine
from octavo.memory import ModelShape
from octavo.process import StartError
from octavo.sizes import format_bytes
from worker_svc.config import WorkerConfig
from worker_svc.device.memory import Meter
from worker_svc.kv_cache import memory_table, resident_bytes, size_card_memory, size_memory
from worker_svc.parallel.group import Membership
from worker_svc.profiling import StepMemory

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class CardSteps:
    """A GPU whose steps were measured."""

    meter: Meter
    steps: StepMemory
    backend: Backend


def allocate_cache(
    config: WorkerConfig, shape: ModelShape, dtype: str, spec: KVCacheSpec, backend: Backend, ranks: Membership
) -> KVCache:
    """The device tier; `spec` says everything but the number of blocks. Raises StartError for more than is free."""
    group = ranks.group
    group.minimum(())  # all weights are loaded: what is free now is free for caches
    memory = size_memory(config, shape, dtype, _own_machine(ranks), resident_bytes(), backend.info.copy_bytes)
    (num_blocks,) = group.minimum((memory.pool.num_blocks,))
    if num_blocks < memory.pool.num_blocks:
        memory = memory.with_blocks(num_blocks, f"the least that fits on one of {group.size} ranks")
    _LOG.info("%s", memory_table(memory, shape, dtype, config, backend.info))
    try:
        return backend.allocate_kv_cache(replace(spec, num_blocks=num_blocks))
    except MemoryError as error:
        raise StartError(f"{error}; lower --kv-cache-memory or --num-kv-blocks") from error


def allocate_card_cache(
    config: WorkerConfig, shape: ModelShape, dtype: str, spec: KVCacheSpec, card: CardSteps, ranks: Membership
) -> KVCache:
    """The device tier on a GPU, sized by what was measured there; raises StartError as `allocate_cache`."""
    block_bytes = replace(spec, num_blocks=1).num_bytes
    memory = size_card_memory(
        config, block_bytes, card.meter.read(), card.steps.workspace_bytes, card.steps.graph_bytes
    )
    (num_blocks,) = ranks.group.minimum((memory.pool.num_blocks,))
    if num_blocks < memory.pool.num_blocks:
        memory = memory.with_blocks(num_blocks, f"the least that fits on one of {ranks.group.size} ranks")
    _LOG.info("%s", memory_table(memory, shape, dtype, config, card.backend.info))
    try:
        return card.backend.allocate_kv_cache(replace(spec, num_blocks=num_blocks))
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise StartError(
            f"{error}; somebody else took memory of the card meanwhile: lower --gpu-memory-utilization, or start again"
        ) from error


def allocate_host_cache(config: WorkerConfig, backend: Backend, cache: KVCache, ranks: Membership) -> KVCache | None:
    """The second tier, in host memory; None without --swap-space. Raises StartError for more than is free."""
    num_bytes = config.swap_bytes
    if num_bytes == 0:
        return None
    block_bytes = cache.spec.bytes_per_block
    ranks.group.minimum(())
    free = _own_machine(ranks).free_memory_bytes
    if num_bytes > free or num_bytes < block_bytes:
        raise StartError(
            f"--swap-space {config.swap_space:g}: a block takes {format_bytes(block_bytes)} and {format_bytes(free)} "
            "are free beside weights, KV cache and workspace; use a size between the two, or 0 for no host tier"
        )
    (num_blocks,) = ranks.group.minimum((num_bytes // block_bytes,))
    _LOG.info("host tier: %d blocks, %s", num_blocks, format_bytes(num_blocks * block_bytes))
    spec = replace(cache.spec, num_blocks=num_blocks)
    try:
        if isinstance(backend, HostTier):
            return backend.allocate_host_kv_cache(spec)
        return backend.allocate_kv_cache(spec)
    except MemoryError as error:
        raise StartError(f"--swap-space {config.swap_space:g}: {error}; use less, or 0 for no host tier") from error


def _own_machine(ranks: Membership) -> MachineFacts:
    """The machine as this rank may use it: those that share it have an even part of its memory each."""
    machine = collect_machine()
    return replace(
        machine,
        total_memory_bytes=machine.total_memory_bytes // ranks.num_local_ranks,
        free_memory_bytes=machine.free_memory_bytes // ranks.num_local_ranks,
    )
