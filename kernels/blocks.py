"""What backends check of caches, block ids, layers and plans, whatever the layout. Knows specs alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.api import KV_PARTITION, KVCacheSpec


def check_block_size(spec: KVCacheSpec, least: int = 1) -> None:
    """Raises ValueError for blocks that partitions of attention do not consist of."""
    if spec.block_size < least or KV_PARTITION % spec.block_size:
        raise ValueError(
            f"block_size {spec.block_size} must be {least} or more and divide the attention partition of {KV_PARTITION}"
        )


def no_room(spec: KVCacheSpec) -> MemoryError:
    return MemoryError(
        f"a KV cache of {spec.num_bytes} bytes ({spec.num_blocks} blocks of {spec.bytes_per_block} bytes) "
        "does not fit in memory; lower the number of blocks"
    )


def check_layer(spec: KVCacheSpec, layer: int) -> None:
    """Raises ValueError for a layer that the cache does not have."""
    if not 0 <= layer < spec.num_layers:
        raise ValueError(f"layer {layer} is not in 0..{spec.num_layers - 1}")


def check_planned(blocks: tuple[int, int], spec: KVCacheSpec) -> None:
    """Raises ValueError for a plan that was made for a cache of other (num_blocks, block_size)."""
    if blocks != (spec.num_blocks, spec.block_size):
        raise ValueError(f"the plan was made for a cache of {blocks[0]} blocks of {blocks[1]} tokens")


def check_copy(src: KVCacheSpec, src_ids: Sequence[int], dst: KVCacheSpec, dst_ids: Sequence[int]) -> None:
    """Raises ValueError when the lists differ in length or a block of one cache does not fit the other."""
    if len(src_ids) != len(dst_ids):
        raise ValueError(f"src_ids names {len(src_ids)} blocks, dst_ids {len(dst_ids)}")
    if _block_shape(src) != _block_shape(dst):
        raise ValueError(f"blocks of {src} cannot be copied to {dst}")


def check_canonical(spec: KVCacheSpec, block_ids: Sequence[int], blocks: Tensor) -> None:
    """Raises ValueError when `blocks` is not [2, block, kv_head, token, dim] of the cache's sizes and dtype."""
    expected = (2, len(block_ids), spec.num_kv_heads, spec.block_size, spec.head_dim)
    if tuple(blocks.shape) != expected or blocks.dtype != spec.dtype:
        raise ValueError(f"blocks is {tuple(blocks.shape)} {blocks.dtype}, must be {expected} {spec.dtype}")


def block_index(spec: KVCacheSpec, block_ids: Sequence[int], name: str) -> Tensor:
    """The ids as int64. Raises ValueError naming the list and the first id that the cache does not have."""
    for block_id in block_ids:
        if not 0 <= block_id < spec.num_blocks:
            raise ValueError(f"{name} holds block {block_id}, the cache has blocks 0..{spec.num_blocks - 1}")
    return torch.tensor(block_ids, dtype=torch.int64)


def _block_shape(spec: KVCacheSpec) -> tuple[object, ...]:
    return spec.num_layers, spec.block_size, spec.num_kv_heads, spec.head_dim, spec.dtype
