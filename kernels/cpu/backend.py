"""`CpuBackend`: the kernel API over the C++ extension.

Knows which call goes where and what the extension may trust: it follows addresses blindly, so shapes, types and
contiguity are checked here and in kernels.contracts, as cheaply as attribute reads allow: a step makes hundreds of
calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels import contracts
from kernels import linear as linears
from kernels.api import (
    AttentionPlan,
    AttentionSpec,
    BackendInfo,
    FusableLayer,
    FusedLayers,
    GatedActivation,
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
from kernels.cpu import cache as caches
from kernels.cpu import layers as stacks
from kernels.cpu import plan as plans
from kernels.cpu import products, sampling
from kernels.cpu.cache import CpuCache
from kernels.cpu.dtypes import dtype_code
from kernels.cpu.extension import native, runnable_variants, variant_index
from kernels.cpu.plan import CpuPlan

# Enough for small models and tests; a worker says what its machine spares.
DEFAULT_CODED_BYTES = 64 * 2**20


class CpuBackend:
    """C++ kernels on the CPU. `info` is final once all weights are packed.

    Matrix products are the extension's own. Where the processor multiplies bf16, weights of bf16 go through oneDNN,
    which uses those instructions.
    """

    def __init__(
        self, num_threads: int | None = None, variant: str | None = None, max_coded_bytes: int = DEFAULT_CODED_BYTES
    ) -> None:
        """`num_threads` None keeps torch's count; `variant` None takes the best that this processor runs. Second
        copies of weights take `max_coded_bytes` at most.

        Raises RuntimeError when the extension cannot serve, ValueError for a variant that does not run here.
        """
        self._native = native()
        self._variant_index = variant_index(variant)
        self._variant = variant or runnable_variants()[0]
        self._doubts: dict[str, None] = {}
        self._memory = products.PanelMemory(max_coded_bytes)
        self._kept_in: set[str] = set()
        self._sampling: sampling.CheckedBatch | None = None
        self.set_num_threads(torch.get_num_threads() if num_threads is None else num_threads)

    @property
    def info(self) -> BackendInfo:
        variant = f"{self._variant}+panels"
        if self._uses_onednn(torch.bfloat16):
            variant += f"+onednn_bf16_{torch.backends.cpu.get_cpu_capability().lower()}"
        copy_bytes, saved_bytes = self._memory.copies.num_bytes, self._memory.saved_bytes
        kept = ", ".join(sorted(self._kept_in))
        return BackendInfo("cpu", variant, not self._doubts, "; ".join(self._doubts), kept, copy_bytes, saved_bytes)

    @property
    def num_threads(self) -> int:
        return self._num_threads

    def set_num_threads(self, num_threads: int) -> None:
        """Takes effect with the next call, for torch's products too; changes no result."""
        if num_threads < 1:
            raise ValueError(f"num_threads {num_threads} must be at least 1")
        if num_threads != torch.get_num_threads():
            torch.set_num_threads(num_threads)
        self._num_threads = num_threads
        self._context = self._variant_index | num_threads << 8

    # KV cache

    def allocate_kv_cache(self, spec: KVCacheSpec) -> KVCache:
        return caches.allocate(spec)

    def copy_blocks(self, src: KVCache, src_ids: Sequence[int], dst: KVCache, dst_ids: Sequence[int]) -> None:
        caches.copy_blocks(contracts.own_cache(src, CpuCache), src_ids, contracts.own_cache(dst, CpuCache), dst_ids)

    def export_blocks(self, cache: KVCache, layer: int, block_ids: Sequence[int]) -> Tensor:
        return caches.export_blocks(contracts.own_cache(cache, CpuCache), layer, block_ids)

    def import_blocks(self, cache: KVCache, layer: int, block_ids: Sequence[int], blocks: Tensor) -> None:
        caches.import_blocks(contracts.own_cache(cache, CpuCache), layer, block_ids, blocks)

    # Attention

    def plan_attention(self, batch: RaggedBatch, cache: KVCache) -> AttentionPlan:
        own_cache = contracts.own_cache(cache, CpuCache)
        plan = plans.plan_attention(batch, own_cache.spec)
        own_cache.pages.reach(plan.max_block)
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
        own_cache, own_plan = contracts.own_cache(cache, CpuCache), contracts.own_plan(plan, CpuPlan)
        num_heads = contracts.num_query_heads(qkv, own_plan, own_cache.spec)
        contracts.check_rotation(rope, qk_norm, own_cache.spec.head_dim, own_plan.max_position + 1)
        q_weight, k_weight, eps, weight_dtype = 0, 0, 0.0, qkv.dtype
        if qk_norm is not None:
            q_weight, k_weight, eps = qk_norm.q_weight.data_ptr(), qk_norm.k_weight.data_ptr(), qk_norm.eps
            weight_dtype = qk_norm.q_weight.dtype
        self._native.rope_write_kv(
            self._context,
            qkv.data_ptr(),
            own_plan.batch.num_tokens,
            num_heads,
            dtype_code(qkv.dtype),
            own_plan.slots_address,
            own_plan.positions_address,
            rope.cos.data_ptr(),
            rope.sin.data_ptr(),
            rope.cos.shape[1],
            q_weight,
            k_weight,
            eps,
            dtype_code(weight_dtype),
            *own_cache.layer_arguments(layer),
        )

    def attention(self, qkv: Tensor, cache: KVCache, layer: int, plan: AttentionPlan, spec: AttentionSpec) -> Tensor:
        own_cache, own_plan = contracts.own_cache(cache, CpuCache), contracts.own_plan(plan, CpuPlan)
        num_heads = contracts.num_query_heads(qkv, own_plan, own_cache.spec)
        contracts.check_attention(spec, num_heads)
        out = qkv.new_empty((qkv.shape[0], num_heads * own_cache.spec.head_dim))
        self._native.attention(
            self._context,
            qkv.data_ptr(),
            out.data_ptr(),
            *own_plan.row_arguments,
            num_heads,
            dtype_code(qkv.dtype),
            spec.scale,
            spec.window,
            spec.soft_cap,
            *own_cache.layer_arguments(layer),
        )
        return out

    # Dense layers

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        if not self._uses_onednn(weight.dtype):
            own = products.pack(self._context, weight, bias, self._memory)
            self._kept_in.add(own.kept_in)
            return own
        packed, doubt = linears.pack(weight, bias)
        self._kept_in.add(str(packed.compute_dtype).removeprefix("torch."))
        if doubt:
            self._doubts[doubt] = None
        return packed

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        if isinstance(packed, products.CpuLinear):
            self._memory.copies.adopt()
            return products.linear(self._context, x, packed)
        if isinstance(packed, linears.ReferenceLinear) and self._uses_onednn(packed.dtype):
            return linears.linear(x, packed)
        raise TypeError(f"the weight was packed by another backend: {type(packed).__name__}")

    def make_copies(self, goes_on: Callable[[], bool]) -> int:
        """In twelve bits a weight, of matrices that are kept in bf16."""
        return self._memory.copies.make(self._variant_index | 1 << 8, goes_on)

    def _uses_onednn(self, dtype: torch.dtype) -> bool:
        return dtype == torch.bfloat16 and self._variant == "avx512_bf16" and linears.onednn_supports(dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        contracts.check_residual(residual, x)
        return self._norm(x, residual, weight, eps)

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        x = x if x.is_contiguous() else x.contiguous()
        rows, hidden = x.shape
        contracts.check_norm(weight, hidden)
        out = torch.empty_like(x)
        code = dtype_code(x.dtype)
        residual_code, address = (0, 0) if residual is None else (dtype_code(residual.dtype), residual.data_ptr())
        self._native.norm(
            self._context,
            x.data_ptr(),
            address,
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            hidden,
            eps,
            code,
            residual_code,
            dtype_code(weight.dtype),
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(self._native.silu_mul, gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(self._native.gelu_mul, gate_up)

    def _gated(self, kernel: Callable[..., None], gate_up: Tensor) -> Tensor:
        gate_up = gate_up if gate_up.is_contiguous() else gate_up.contiguous()
        rows, width = gate_up.shape
        out = gate_up.new_empty((rows, width // 2))
        kernel(self._context, gate_up.data_ptr(), out.data_ptr(), rows, width // 2, dtype_code(gate_up.dtype))
        return out

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        x = x if x.is_contiguous() else x.contiguous()
        out = torch.empty(x.shape, dtype=torch.float32)
        self._native.soft_cap(self._context, x.data_ptr(), out.data_ptr(), x.numel(), cap, dtype_code(x.dtype))
        return out

    # Whole layers

    def fuse_layers(
        self, layers: Sequence[FusableLayer], eps: float, activation: GatedActivation
    ) -> FusedLayers | None:
        """None where oneDNN multiplies. Raises ValueError for layers that do not fit each other."""
        stack = stacks.stack_layers(layers, eps, activation)
        if stack is None:
            return None

        def run(num_layers: int, x: Tensor, residual: Tensor, cache: KVCache, plan: AttentionPlan) -> None:
            own = contracts.own_plan(plan, CpuPlan), contracts.own_cache(cache, CpuCache)
            self._memory.copies.adopt()
            stacks.run(self._context, stack, num_layers, x, residual, *own)

        return run

    # Sampling

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Samples:
        checked = self._sampling
        if checked is None or checked.batch is not batch or checked.num_rows != len(logits):
            checked = self._sampling = sampling.check(batch, len(logits))
        return sampling.sample(self._context, logits, checked)

    def logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int, vocab_size: int) -> Logprobs:
        return sampling.logprobs(self._context, logits, token_ids, num_top, vocab_size)
