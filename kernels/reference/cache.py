"""The reference's paged KV cache: one tensor, [layer, 2 (K, V), kv_head, block, token, dim].

Knows blocks by number; knows neither who owns them nor what they mean. Heads come before blocks so that the blocks of
one partition, gathered for one head, lie in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.api import KVCacheSpec
from kernels.blocks import block_index, check_block_size, check_canonical, check_copy, check_layer, no_room


@dataclass(frozen=True)
class ReferenceCache:
    """Key and value memory of one worker."""

    spec: KVCacheSpec
    data: Tensor


def allocate(spec: KVCacheSpec) -> ReferenceCache:
    """A zeroed cache. Raises ValueError for a block size that does not divide a partition, MemoryError if too large.

    An fp8 cache is float8_e4m3fn.
    """
    check_block_size(spec)
    shape = (spec.num_layers, 2, spec.num_kv_heads, spec.num_blocks, spec.block_size, spec.head_dim)
    try:
        return ReferenceCache(spec, torch.zeros(shape, dtype=spec.dtype))
    except RuntimeError as error:
        raise no_room(spec) from error


def copy_blocks(src: ReferenceCache, src_ids: Sequence[int], dst: ReferenceCache, dst_ids: Sequence[int]) -> None:
    """Copies whole blocks over all layers; all are read before any is written."""
    check_copy(src.spec, src_ids, dst.spec, dst_ids)
    if src_ids:
        read = bits(src.data).index_select(3, block_index(src.spec, src_ids, "src_ids"))
        bits(dst.data).index_copy_(3, block_index(dst.spec, dst_ids, "dst_ids"), read)


def export_blocks(cache: ReferenceCache, layer: int, block_ids: Sequence[int]) -> Tensor:
    """[2, block, kv_head, token, dim] of one layer; a copy."""
    index = block_index(cache.spec, block_ids, "block_ids")
    return _layer(cache, layer).index_select(2, index).transpose(1, 2).contiguous()


def import_blocks(cache: ReferenceCache, layer: int, block_ids: Sequence[int], blocks: Tensor) -> None:
    """The inverse of export_blocks; raises ValueError for another shape or dtype."""
    spec = cache.spec
    check_canonical(spec, block_ids, blocks)
    index = block_index(spec, block_ids, "block_ids")
    bits(_layer(cache, layer)).index_copy_(2, index, bits(blocks.transpose(1, 2)))


def bits(x: Tensor) -> Tensor:
    """fp8 numbers as bytes, which torch moves; others as they are."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _layer(cache: ReferenceCache, layer: int) -> Tensor:
    check_layer(cache.spec, layer)
    return cache.data[layer]
