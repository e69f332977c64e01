"""`ReferenceBackend`: the kernel API over the modules beside it. Knows which call goes where, and what it may claim."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import linear as linears
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
from kernels.contracts import own_cache, own_plan
from kernels.reference import attention as attentions
from kernels.reference import cache as caches
from kernels.reference import norms, sampling
from kernels.reference import plan as plans
from kernels.reference.cache import ReferenceCache
from kernels.reference.plan import ReferencePlan

# Query heads per KV head that models have; others are probed when they first attend.
_USUAL_GROUPS = (1, 2, 3, 4, 5, 6, 7, 8)


class ReferenceBackend:
    """Plain torch on CPU. `info` is final once weights are packed and the cache is allocated: both are probed then."""

    def __init__(self, num_threads: int | None = None) -> None:
        """Sets torch's thread count, the whole process's, when `num_threads` is given."""
        if num_threads is not None:
            self.set_num_threads(num_threads)
        # Reasons against the claim of batch invariance, each once, in the order found.
        self._doubts: dict[str, None] = {}

    @property
    def info(self) -> BackendInfo:
        return BackendInfo("reference", _variant(), not self._doubts, "; ".join(self._doubts))

    def set_num_threads(self, num_threads: int) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads {num_threads} must be at least 1")
        torch.set_num_threads(num_threads)

    def allocate_kv_cache(self, spec: KVCacheSpec) -> KVCache:
        for group in _USUAL_GROUPS:
            self._probe_attention(group, spec.head_dim)
        return caches.allocate(spec)

    def copy_blocks(self, src: KVCache, src_ids: Sequence[int], dst: KVCache, dst_ids: Sequence[int]) -> None:
        caches.copy_blocks(own_cache(src, ReferenceCache), src_ids, own_cache(dst, ReferenceCache), dst_ids)

    def export_blocks(self, cache: KVCache, layer: int, block_ids: Sequence[int]) -> Tensor:
        return caches.export_blocks(own_cache(cache, ReferenceCache), layer, block_ids)

    def import_blocks(self, cache: KVCache, layer: int, block_ids: Sequence[int], blocks: Tensor) -> None:
        caches.import_blocks(own_cache(cache, ReferenceCache), layer, block_ids, blocks)

    def plan_attention(self, batch: RaggedBatch, cache: KVCache) -> AttentionPlan:
        return plans.plan_attention(batch, cache.spec)

    def rope_write_kv(
        self,
        qkv: Tensor,
        cache: KVCache,
        layer: int,
        plan: AttentionPlan,
        rope: RopeTable,
        qk_norm: QKNorm | None,
    ) -> None:
        own = own_cache(cache, ReferenceCache), layer, own_plan(plan, ReferencePlan)
        attentions.rope_write_kv(qkv, *own, rope, qk_norm)

    def attention(self, qkv: Tensor, cache: KVCache, layer: int, plan: AttentionPlan, spec: AttentionSpec) -> Tensor:
        self._probe_attention(spec.num_heads // cache.spec.num_kv_heads, cache.spec.head_dim)
        return attentions.attention(qkv, own_cache(cache, ReferenceCache), layer, own_plan(plan, ReferencePlan), spec)

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        packed, doubt = linears.pack(weight, bias)
        if doubt:
            self._doubts[doubt] = None
        return packed

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        if not isinstance(packed, linears.ReferenceLinear):
            raise TypeError(f"the weight was packed by another backend: {type(packed).__name__}")
        return linears.linear(x, packed)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norms.rms_normalise(x.float(), weight, eps).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norms.rms_normalise(residual.add_(x).float(), weight, eps).to(x.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return norms.silu_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return norms.gelu_mul(gate_up)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return norms.soft_cap(x, cap)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Samples:
        return sampling.sample(logits, batch)

    def logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int, vocab_size: int) -> Logprobs:
        return sampling.logprobs(logits, token_ids, num_top, vocab_size)

    def _probe_attention(self, group: int, head_dim: int) -> None:
        if not attentions.group_products_agree(group, head_dim):
            doubt = f"the attention product of {group} heads of {head_dim} gives a token other bits in other batches"
            self._doubts[doubt] = None


def _variant() -> str:
    """The libraries' code path: it decides bits, and with the library versions it is all that does."""
    products = "onednn" if linears.onednn_supports(torch.float32) else "aten"
    if linears.onednn_supports(torch.bfloat16):
        products += "_bf16"
    return f"{products}_{torch.backends.cpu.get_cpu_capability().lower()}"
