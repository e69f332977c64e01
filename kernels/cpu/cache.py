"""The C++ backend's paged KV cache and its exchange with the canonical layout.

Knows the layout that src/kv_layout.h defines and states it again in tensor views, so that tests compare the two.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.api import KVCacheSpec
from kernels.blocks import block_index, check_block_size, check_canonical, check_copy, check_layer, no_room
from kernels.cpu.dtypes import dtype_code
from kernels.cpu.extension import native
from kernels.cpu.pages import PagesAhead

# Positions of a key tile.
_TILE = 16
_MAX_HEAD_DIM = 512


@dataclass(frozen=True)
class CpuCache:
    """Key and value memory, [layer, block, kv_head, 2 (K, V), elements]."""

    spec: KVCacheSpec
    data: Tensor
    # Address and shape of each layer as the kernels take them.
    layers: tuple[tuple[int, int, int, int, int, int], ...]
    pages: PagesAhead

    def layer_arguments(self, layer: int) -> tuple[int, int, int, int, int, int]:
        """Raises ValueError for a layer that the cache does not have."""
        check_layer(self.spec, layer)
        return self.layers[layer]


def allocate(spec: KVCacheSpec) -> CpuCache:
    """A zeroed cache. Raises ValueError for a shape the kernels do not take, MemoryError when it does not fit."""
    check_block_size(spec, least=2)
    if spec.head_dim % _TILE or not 0 < spec.head_dim <= _MAX_HEAD_DIM:
        raise ValueError(f"head_dim {spec.head_dim} must be a multiple of {_TILE} up to {_MAX_HEAD_DIM}")
    shape = (spec.num_layers, spec.num_blocks, spec.num_kv_heads, 2, _padded_positions(spec) * spec.head_dim)
    code = dtype_code(spec.dtype)
    try:
        data = _zero_pages(math.prod(shape), spec.dtype).view(shape)
    except OSError as error:
        raise no_room(spec) from error
    native().advise_huge_pages(data.data_ptr(), data.numel() * data.element_size())
    stride = data.stride(0) * data.element_size()
    shape_arguments = (spec.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim, code)
    layers = tuple((data.data_ptr() + layer * stride, *shape_arguments) for layer in range(spec.num_layers))
    return CpuCache(spec, data, layers, PagesAhead(data))


def _zero_pages(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Zeros that cost nothing until touched: `torch.zeros` would write every page of a pool that may never be full."""
    memory = mmap.mmap(-1, max(1, num_elements * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype, count=num_elements)


def copy_blocks(src: CpuCache, src_ids: Sequence[int], dst: CpuCache, dst_ids: Sequence[int]) -> None:
    """Copies whole blocks over all layers, as if all were read before any is written."""
    check_copy(src.spec, src_ids, dst.spec, dst_ids)
    from_ids, to_ids = block_index(src.spec, src_ids, "src_ids"), block_index(dst.spec, dst_ids, "dst_ids")
    if src is dst and not set(src_ids).isdisjoint(dst_ids):
        dst.data.index_copy_(1, to_ids, src.data.index_select(1, from_ids))
        return
    bytes_of = src.data.element_size()
    native().copy_blocks(
        src.data.data_ptr(),
        dst.data.data_ptr(),
        from_ids.data_ptr(),
        to_ids.data_ptr(),
        len(src_ids),
        src.spec.num_layers,
        src.data.stride(1) * bytes_of,
        src.data.stride(0) * bytes_of,
        dst.data.stride(0) * bytes_of,
    )


def export_blocks(cache: CpuCache, layer: int, block_ids: Sequence[int]) -> Tensor:
    """[2, block, kv_head, token, dim] of one layer; a copy."""
    spec = cache.spec
    cache.layer_arguments(layer)
    blocks = cache.data[layer].index_select(0, block_index(spec, block_ids, "block_ids"))
    keys, values = blocks.unbind(2)
    both = (_canonical_keys(keys, spec), _canonical_values(values, spec))
    return torch.stack([x[:, :, : spec.block_size] for x in both])


def import_blocks(cache: CpuCache, layer: int, block_ids: Sequence[int], blocks: Tensor) -> None:
    """The inverse of export_blocks; raises ValueError for another shape or dtype."""
    spec = cache.spec
    cache.layer_arguments(layer)
    check_canonical(spec, block_ids, blocks)
    padding = _padded_positions(spec) - spec.block_size
    keys, values = torch.nn.functional.pad(blocks, (0, 0, 0, padding)).unbind(0)
    own = torch.stack((_own_keys(keys, spec), _own_values(values, spec)), dim=2)
    cache.data[layer].index_copy_(0, block_index(spec, block_ids, "block_ids"), own)


# Between [block, head, position, dim] and [block, head, elements]; bf16 keys hold pairs of dims and values pairs of
# positions side by side.


def _canonical_keys(elements: Tensor, spec: KVCacheSpec) -> Tensor:
    head = elements.shape[:2]
    if spec.dtype != torch.bfloat16:
        return elements.view(*head, -1, spec.head_dim, _TILE).transpose(3, 4).flatten(2, 3)
    tiles = elements.view(*head, -1, spec.head_dim // 2, _TILE, 2)
    return tiles.permute(0, 1, 2, 4, 3, 5).reshape(*head, -1, spec.head_dim)


def _own_keys(keys: Tensor, spec: KVCacheSpec) -> Tensor:
    head = keys.shape[:2]
    if spec.dtype != torch.bfloat16:
        return keys.view(*head, -1, _TILE, spec.head_dim).transpose(3, 4).reshape(*head, -1)
    return keys.view(*head, -1, _TILE, spec.head_dim // 2, 2).permute(0, 1, 2, 4, 3, 5).reshape(*head, -1)


def _canonical_values(elements: Tensor, spec: KVCacheSpec) -> Tensor:
    head = elements.shape[:2]
    if spec.dtype != torch.bfloat16:
        return elements.view(*head, -1, spec.head_dim)
    return elements.view(*head, -1, spec.head_dim, 2).transpose(3, 4).flatten(2, 3)


def _own_values(values: Tensor, spec: KVCacheSpec) -> Tensor:
    head = values.shape[:2]
    if spec.dtype != torch.bfloat16:
        return values.reshape(*head, -1)
    return values.reshape(*head, -1, 2, spec.head_dim).transpose(3, 4).reshape(*head, -1)


def _padded_positions(spec: KVCacheSpec) -> int:
    return -(-spec.block_size // _TILE) * _TILE
