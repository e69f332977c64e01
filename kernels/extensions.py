"""What a backend may offer beside `Backend`, each a protocol that a caller asks for with isinstance.

Part of `kernels.api`, which is where they are imported from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.layer_types import (
    AttentionPlan,
    AttentionSpec,
    GatedActivation,
    KVCache,
    KVCacheSpec,
    PackedLinear,
    QKNorm,
    RopeTable,
)
from kernels.quantized import QuantizedWeight


@runtime_checkable
class QuantizedLinears(Protocol):
    """Products with weights as quantized checkpoints hold them. Other backends are given dequantized ones."""

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> PackedLinear:
        """For `linear` with activations of `dtype`; wherever the weight lies. Dequantized where no kernel takes it."""
        ...


@runtime_checkable
class HostTier(Protocol):
    """A lower tier of the KV cache in memory of the host that the device copies from and to by itself."""

    def allocate_host_kv_cache(self, spec: KVCacheSpec) -> KVCache:
        """A zeroed cache for `copy_blocks` with one on the device. Raises MemoryError when it does not fit."""
        ...


@runtime_checkable
class SecondCopies(Protocol):
    """Copies of weights that make steps of few rows faster and change no bit, so that they may come after the start."""

    def make_copies(self, goes_on: Callable[[], bool]) -> int:
        """Makes those of all weights that are packed, until `goes_on` says no, asked before each; the bytes they take.

        In any one thread, beside the one that computes, which uses what is made from its next call on.
        """
        ...


@dataclass(frozen=True)
class FusableLayer:
    """One layer of a decoder, as one of several fused. Its input's norm belongs to what comes before it."""

    qkv: PackedLinear
    qk_norm: QKNorm | None
    rope: RopeTable
    attention: AttentionSpec
    output: PackedLinear
    # Of what attention and MLP give, before the sum with the residual; None in families that have none.
    attention_out_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear
    mlp_out_norm: Tensor | None
    # The next layer's input norm, or the final one.
    next_norm: Tensor


class FusedLayers(Protocol):
    """Layers as one call, bitwise equal to one call a kernel."""

    def __call__(self, num_layers: int, x: Tensor, residual: Tensor, cache: KVCache, plan: AttentionPlan) -> None:
        """Runs the first `num_layers` in place on [num_tokens, hidden_size]: x is the normed input and then the output.

        The layers are the cache's first. A row must not read blocks that another row writes in the same call. Raises
        ValueError for tensors that do not fit.
        """
        ...


@runtime_checkable
class LayerFusion(Protocol):
    """Many layers without a call, a check and a tensor for each kernel."""

    def fuse_layers(
        self, layers: Sequence[FusableLayer], eps: float, activation: GatedActivation
    ) -> FusedLayers | None:
        """`eps` is that of all norms but the heads'. None where it has no such path for these weights."""
        ...
