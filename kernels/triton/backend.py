"""`TritonBackend`: the kernel API over the modules beside it. Knows which call goes where, and what it may claim.

Every call only launches: nothing waits for the device, and launches depend on sizes alone, so that a step, its
plan_attention included, can be captured in a CUDA graph and replayed with other lengths in the same tensors. One
exception: plan_attention with `check_faults`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kernels.api import (
    AttentionPlan,
    AttentionSpec,
    BackendInfo,
    KVCache,
    KVCacheSpec,
    Logprobs,
    PackedLinear,
    QKNorm,
    RaggedBatch,
    RopeTable,
    Samples,
    SamplingBatch,
)
from kernels.contracts import check_attention, num_query_heads, own_cache, own_plan
from kernels.quantized import QuantizedWeight
from kernels.triton import activations, kv_write, metadata, norms, quantized, quantized_layout, sampling
from kernels.triton import cache as caches
from kernels.triton import linear as linears
from kernels.triton.cache import TritonCache
from kernels.triton.decode import decode_attention
from kernels.triton.layer import DeviceShape, LayerAttention, layer_attention
from kernels.triton.metadata import TritonPlan
from kernels.triton.prefill import prefill_attention


class TritonBackend:
    """Triton kernels on one device."""

    def __init__(
        self,
        device: torch.device,
        batch_invariant: bool = False,
        check_faults: bool = False,
        shape: DeviceShape | None = None,
    ) -> None:
        """`batch_invariant` fixes the order of every sum, at a cost in matrix products and prefill.

        `check_faults` makes plan_attention wait for the device and raise; without it a faulty row is computed as empty,
        and the caller finds it in the plan's `faults`. `shape` stands for the device's own where there is none to ask.
        """
        self._device = device
        self._batch_invariant = batch_invariant
        self._check_faults = check_faults
        self._shape = device_shape(device) if shape is None else shape
        self._num_kept: Counter[str] = Counter()
        self._layers: dict[tuple[AttentionSpec, KVCacheSpec, int, torch.dtype], LayerAttention] = {}

    @property
    def info(self) -> BackendInfo:
        products = "fixed" if self._batch_invariant else "cublas"
        note = "" if self._batch_invariant else "matrix products and prefill sum in an order that depends on the batch"
        kept = ", ".join(f"{kind} ({number})" for kind, number in self._num_kept.most_common())
        return BackendInfo("triton", f"sm_{self._shape.capability}+{products}", self._batch_invariant, note, kept)

    def set_num_threads(self, num_threads: int) -> None:
        """The host's threads; they change nothing here."""
        if num_threads < 1:
            raise ValueError(f"num_threads {num_threads} must be at least 1")
        torch.set_num_threads(num_threads)

    # KV cache

    def allocate_kv_cache(self, spec: KVCacheSpec) -> KVCache:
        return caches.allocate(spec, self._device, pinned=False)

    def allocate_host_kv_cache(self, spec: KVCacheSpec) -> KVCache:
        """The lower tier: a zeroed cache in pinned host memory, for copy_blocks with one on the device."""
        return caches.allocate(spec, self._device, pinned=True)

    def copy_blocks(self, src: KVCache, src_ids: Sequence[int], dst: KVCache, dst_ids: Sequence[int]) -> None:
        caches.copy_blocks(own_cache(src, TritonCache), src_ids, own_cache(dst, TritonCache), dst_ids)

    def export_blocks(self, cache: KVCache, layer: int, block_ids: Sequence[int]) -> Tensor:
        return caches.export_blocks(own_cache(cache, TritonCache), layer, block_ids)

    def import_blocks(self, cache: KVCache, layer: int, block_ids: Sequence[int], blocks: Tensor) -> None:
        caches.import_blocks(own_cache(cache, TritonCache), layer, block_ids, blocks)

    # Attention

    def plan_attention(self, batch: RaggedBatch, cache: KVCache) -> AttentionPlan:
        plan = metadata.plan_attention(batch, cache.spec)
        if self._check_faults:
            message = metadata.fault_message(plan)
            if message:
                raise ValueError(message)
        return plan

    def rope_write_kv(
        self,
        qkv: Tensor,
        cache: KVCache,
        layer: int,
        plan: AttentionPlan,
        rope: RopeTable,
        qk_norm: QKNorm | None,
    ) -> None:
        kept, planned = own_cache(cache, TritonCache), own_plan(plan, TritonPlan)
        num_query_heads(qkv, planned, kept.spec)
        kv_write.rope_write_kv(qkv, kept, layer, planned, (rope, qk_norm), self._shape.rotated_pairs)

    def attention(self, qkv: Tensor, cache: KVCache, layer: int, plan: AttentionPlan, spec: AttentionSpec) -> Tensor:
        kept, planned = own_cache(cache, TritonCache), own_plan(plan, TritonPlan)
        check_attention(spec, num_query_heads(qkv, planned, kept.spec))
        how = self._layer(spec, kept.spec, layer, qkv.dtype)
        out = torch.empty((qkv.shape[0], spec.num_heads * how.head_dim), dtype=qkv.dtype, device=qkv.device)
        if planned.has_decode:
            decode_attention(qkv, kept.layers[layer], planned, how, out)
        if planned.has_prefill:
            prefill_attention(qkv, kept.layers[layer], planned, how, out)
        return out

    def _layer(self, spec: AttentionSpec, cache: KVCacheSpec, layer: int, query: torch.dtype) -> LayerAttention:
        """Derived once per layer with scales of its own, once for all layers of one kind without."""
        plain = replace(cache, num_blocks=0) if cache.scales is None else cache
        key = (spec, plain, 0 if cache.scales is None else layer, query)
        if key not in self._layers:
            self._layers[key] = layer_attention(spec, cache, layer, query, self._shape, self._batch_invariant)
        return self._layers[key]

    # Dense layers

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return self._kept(linears.pack(weight, bias))

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> PackedLinear:
        """A quantized weight for activations of `dtype`, moved to the device; dequantized where no kernel takes it."""
        return self._kept(quantized_layout.pack(weight, bias, dtype, self._device))

    def _kept(self, packed: linears.TritonLinear | quantized_layout.QuantizedLinear) -> PackedLinear:
        self._num_kept[packed.kept_as] += 1
        return packed

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        if isinstance(packed, quantized_layout.QuantizedLinear):
            return quantized.linear(x, packed, self._batch_invariant)
        if not isinstance(packed, linears.TritonLinear):
            raise TypeError(f"the weight was packed by another backend: {type(packed).__name__}")
        return linears.linear(x, packed, self._shape, self._batch_invariant)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norms.rms_norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norms.rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return activations.gated(gate_up, gelu=False)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return activations.gated(gate_up, gelu=True)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return activations.soft_cap(x, cap)

    # Sampling

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Samples:
        return sampling.sample(logits, batch)

    def logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int, vocab_size: int) -> Logprobs:
        return sampling.logprobs(logits, token_ids, num_top, vocab_size)


def device_shape(device: torch.device) -> DeviceShape:
    """What launches need to know of a CUDA device. Raises ValueError for one that is too old."""
    properties = torch.cuda.get_device_properties(device)
    return DeviceShape(10 * properties.major + properties.minor, properties.multi_processor_count)
