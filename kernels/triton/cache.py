"""The paged KV cache of the Triton kernels, on the device or, as the lower tier, in pinned host memory.

Knows blocks by number; knows neither who owns them nor what they mean. One tensor, [layer, 2 (K, V), block, kv_head,
token, dim]: a head's part of a block is contiguous, which the kernels fetch 16 bytes at a time, and a block's
canonical form is a slice. Copies between the tiers are one launch: the device reads and writes pinned host memory by
itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.api import KVCacheSpec
from kernels.blocks import block_index, check_block_size, check_canonical, check_copy, check_layer, no_room
from kernels.cuda.block_copies import UNIT_BYTES, open_block_copier
from kernels.cuda.host_memory import pinned_zeros
from kernels.triton.launch import UNFUSED

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
_COPY_WORDS = 2048


@dataclass(frozen=True)
class TritonCache:
    """Key and value memory of one tier."""

    spec: KVCacheSpec
    data: Tensor
    # Per layer: keys and values, each [num_blocks, num_kv_heads, block_size, head_dim].
    layers: tuple[tuple[Tensor, Tensor], ...]


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["IDS"])
def _copy_blocks(SRC, DST, IDS, count, src_plane, dst_plane, block_words, WORDS: tl.constexpr):
    """Program (i, plane) copies pair i of IDS [2, count] in one layer's keys or values, in int32 words."""
    pair = tl.program_id(0)
    plane = tl.program_id(1).to(tl.int64)
    src = SRC + plane * src_plane + tl.load(IDS + pair) * block_words
    dst = DST + plane * dst_plane + tl.load(IDS + count + pair) * block_words
    offsets = tl.arange(0, WORDS)
    for first in range(0, block_words, WORDS):
        here = first + offsets < block_words
        tl.store(dst + first + offsets, tl.load(src + first + offsets, mask=here, other=0), mask=here)


def allocate(spec: KVCacheSpec, device: torch.device, pinned: bool) -> TritonCache:
    """A zeroed cache, in pinned host memory when `pinned`.

    Raises ValueError for a dtype, head_dim, block size or scales that the kernels do not take, MemoryError or
    torch.OutOfMemoryError when it does not fit.
    """
    _check_spec(spec)
    shape = (spec.num_layers, 2, spec.num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
    unpin = None
    try:
        if pinned and device.type == "cuda":
            open_block_copier(device)  # now, and not while serving
            data, unpin = pinned_zeros(shape, spec.dtype)
        else:
            data = torch.zeros(shape, dtype=spec.dtype, device="cpu" if pinned else device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise no_room(spec) from error
    cache = TritonCache(spec, data, tuple((layer[0], layer[1]) for layer in data))
    if unpin is not None:
        weakref.finalize(cache, _let_go, device, unpin).atexit = False
    return cache


def _let_go(device: torch.device, unpin: Callable[[], None]) -> None:
    """Of pinned memory, in which copies may still be at work."""
    torch.cuda.synchronize(device)
    unpin()


def _check_spec(spec: KVCacheSpec) -> None:
    check_block_size(spec)
    if spec.dtype not in DTYPES:
        raise ValueError(f"a KV cache of {spec.dtype} is not supported; use one of {', '.join(map(str, DTYPES))}")
    if spec.head_dim > 256 or spec.head_dim % 8:
        raise ValueError(f"head_dim {spec.head_dim} must be a multiple of 8 up to 256")
    if spec.scales is not None:
        if spec.dtype.itemsize != 1:
            raise ValueError(f"scales are for an fp8 cache; this one is {spec.dtype}")
        if len(spec.scales) != spec.num_layers or min(map(min, spec.scales)) <= 0:
            raise ValueError(f"scales must be {spec.num_layers} pairs of positive numbers, one per layer")


def copy_blocks(src: TritonCache, src_ids: Sequence[int], dst: TritonCache, dst_ids: Sequence[int]) -> None:
    """Copies whole blocks over all layers, between caches of either tier; all are read before any is written."""
    check_copy(src.spec, src_ids, dst.spec, dst_ids)
    reads, writes = block_index(src.spec, src_ids, "src_ids"), block_index(dst.spec, dst_ids, "dst_ids")
    if not src_ids:
        return
    if src.data is dst.data and not set(src_ids).isdisjoint(dst_ids):
        # Programs run in any order: a block that is read and written goes through a copy.
        device = src.data.device
        read = _bytes(src.data).index_select(2, reads.to(device))
        _bytes(dst.data).index_copy_(2, writes.to(device), read)
        return
    device = dst.data.device if src.data.device.type == "cpu" else src.data.device
    spec = src.spec
    copier = open_block_copier(device) if device.type == "cuda" and src.data.device != dst.data.device else None
    if copier is not None and spec.bytes_per_block % (2 * spec.num_layers * UNIT_BYTES) == 0:
        return copier.copy(_planes(src.data), _planes(dst.data), _placed(reads, writes, device))
    block_words = spec.num_kv_heads * spec.block_size * spec.head_dim * spec.dtype.itemsize // 4
    _copy_blocks[(len(src_ids), 2 * spec.num_layers)](
        src.data.view(torch.int32),
        dst.data.view(torch.int32),
        _placed(reads, writes, device),
        len(src_ids),
        spec.num_blocks * block_words,
        dst.spec.num_blocks * block_words,
        block_words,
        WORDS=min(_COPY_WORDS, triton.next_power_of_2(block_words)),
        num_warps=4,
        **UNFUSED,
    )


def _placed(reads: Tensor, writes: Tensor, device: torch.device) -> Tensor:
    """[2, n] int64 on the device. Through pinned memory: from other memory a copy may wait for what the stream does."""
    pairs = torch.stack((reads, writes))
    return pairs.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else pairs


def export_blocks(cache: TritonCache, layer: int, block_ids: Sequence[int]) -> Tensor:
    """[2, block, kv_head, token, dim] of one layer, on the cache's device; a copy."""
    check_layer(cache.spec, layer)
    index = block_index(cache.spec, block_ids, "block_ids").to(cache.data.device)
    return _bytes(cache.data[layer]).index_select(1, index).view(cache.spec.dtype)


def import_blocks(cache: TritonCache, layer: int, block_ids: Sequence[int], blocks: Tensor) -> None:
    """The inverse of export_blocks; raises ValueError for another shape or dtype."""
    check_layer(cache.spec, layer)
    check_canonical(cache.spec, block_ids, blocks)
    index = block_index(cache.spec, block_ids, "block_ids").to(cache.data.device)
    _bytes(cache.data[layer]).index_copy_(1, index, _bytes(blocks.to(cache.data.device)))


def _planes(data: Tensor) -> Tensor:
    """[layers * 2, blocks, bytes of a block]."""
    return _bytes(data).view(-1, data.shape[2], data[0, 0, 0].numel() * data.element_size())


def _bytes(x: Tensor) -> Tensor:
    """The last dimension as bytes: torch moves every dtype's bytes, but not every dtype."""
    return x.view(torch.uint8)
