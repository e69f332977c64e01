"""One layer's attention as the kernels take it: sizes, factors and launch configurations, derived from the API's specs.

Knows specs and dtypes; knows no tensors and no batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import triton
import triton.language as tl

from kernels.api import KV_PARTITION, AttentionSpec, KVCacheSpec
from kernels.triton.configs import DecodeConfig, PrefillConfig, architecture, attention_configs
from kernels.triton.launch import UNFUSED

_LOG2_E = math.log2(math.e)
_TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True)
class DeviceShape:
    """What launches depend on besides a step's sizes. Raises ValueError for a device that is too old."""

    # 90 for compute capability 9.0. Cards of one architecture may yet round otherwise: their matrix units differ.
    capability: int
    num_multiprocessors: int
    # Most memory for partial results of decode.
    scratch_bytes: int = 512 << 20
    # Pairs (token, head) that a program rotates.
    rotated_pairs: int = 16

    def __post_init__(self) -> None:
        architecture(self.capability)

    @property
    def arch(self) -> int:
        """The architecture whose tables are used."""
        return architecture(self.capability)


def compute_dtype(query: torch.dtype, cache: torch.dtype) -> torch.dtype:
    """What scores and weights are multiplied in.

    fp16 for an e4m3 cache: the hardware converts to it in one instruction, to bf16 in two. Raises ValueError for a pair
    of dtypes whose product would lose what one of them holds.
    """
    if query in _TRITON_DTYPES:
        if cache == torch.float8_e4m3fn:
            return torch.float16
        if cache == query or (query == torch.float32 and cache in _TRITON_DTYPES):
            return query
    raise ValueError(
        f"a {cache} KV cache cannot serve {query} activations; use the activations' dtype or float8_e4m3fn"
    )


@dataclass(frozen=True)
class LayerAttention:
    """Sizes and factors of a layer; `key_scale` and `value_scale` undo an fp8 cache's scaling."""

    spec: AttentionSpec
    num_kv_heads: int
    head_dim: int
    block_size: int
    # What products are computed in, and bytes of a cached element.
    compute: torch.dtype
    cache_bytes: int
    key_scale: float
    value_scale: float
    device: DeviceShape
    # Fixed partitions in prefill too, and one kind of matrix instruction: see prefill.py.
    partitioned: bool

    @property
    def num_heads(self) -> int:
        return self.spec.num_heads

    @property
    def window(self) -> int | None:
        return self.spec.window

    @property
    def scratch_bytes(self) -> int:
        return self.device.scratch_bytes

    @cached_property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.spec.num_heads // self.num_kv_heads

    @cached_property
    def padded_dim(self) -> int:
        return max(16, int(triton.next_power_of_2(self.head_dim)))

    @cached_property
    def _configs(self) -> tuple[DecodeConfig, PrefillConfig]:
        sizes = self.compute.itemsize, self.cache_bytes
        return attention_configs(self.device.arch, self.head_dim, *sizes, self.partitioned)

    @cached_property
    def decode(self) -> DecodeConfig:
        """With a row of the tile for each head of a group, which may be more than the table's."""
        decode, prefill = self._configs
        rows = int(triton.next_power_of_2(self.group))
        if rows <= decode.block_m:
            return decode
        if self.partitioned:
            # Decode's warps would stand along the positions and add in another order: prefill's stand along the rows.
            rows = max(rows, prefill.block_m)
            return DecodeConfig(rows, prefill.tile, prefill.num_warps, prefill.num_stages, 1)
        return replace(decode, block_m=rows, num_warps=min(8, decode.num_warps * rows // decode.block_m))

    @property
    def prefill(self) -> PrefillConfig:
        return self._configs[1]

    @property
    def num_decode_programs(self) -> int:
        return self.decode.programs_per_multiprocessor * self.device.num_multiprocessors

    @cached_property
    def kernel_arguments(self) -> dict[str, object]:
        """The arguments that both attention kernels take."""
        scale, cap = self.spec.scale * self.key_scale, self.spec.soft_cap
        return {
            **UNFUSED,
            # Exponentials are to base 2. With a cap see score_tile.
            "scale": (scale if cap is None else 2 * cap) * _LOG2_E,
            "cap_scale": None if cap is None else 2 * scale / cap * _LOG2_E,
            "window": self.window,
            "GROUP": self.group,
            "KV_HEADS": self.num_kv_heads,
            "HEAD_DIM": self.head_dim,
            "PADDED_DIM": self.padded_dim,
            "BLOCK_SIZE": self.block_size,
            "PARTITION": KV_PARTITION,
            "COMPUTE": _TRITON_DTYPES[self.compute],
        }


def layer_attention(
    spec: AttentionSpec, cache: KVCacheSpec, layer: int, query: torch.dtype, device: DeviceShape, partitioned: bool
) -> LayerAttention:
    """Raises ValueError for dtypes that do not fit each other, and for sizes without tiles."""
    key_scale, value_scale = cache.layer_scales(layer)
    return LayerAttention(
        spec=spec,
        num_kv_heads=cache.num_kv_heads,
        head_dim=cache.head_dim,
        block_size=cache.block_size,
        compute=compute_dtype(query, cache.dtype),
        cache_bytes=cache.dtype.itemsize,
        key_scale=key_scale,
        value_scale=value_scale,
        device=device,
        partitioned=partitioned,
    )
