"""The kernel API: every operation on tensors that a model step needs, whoever implements it.

Knows tensors, the paged KV cache and one step's ragged batch. Knows no sequences, plans, slots or models. A `Backend`
is one implementation: `kernels.reference` (plain torch, slow, the oracle), `kernels.cpu` (C++), `kernels.triton`
(CUDA). All give the results described here; the tests hold each against the reference.

Batch invariance. A backend whose `info.batch_invariant` is true gives each row of each operation bitwise the same
result whatever the other rows are, however many there are, however a prompt was cut into chunks and with any number of
threads: no reduction order may depend on those. Attention reduces over absolutely aligned partitions of `KV_PARTITION`
positions, combined in ascending order; K and V are always read back from the cache at its precision, also by the chunk
that wrote them; where rows are split over threads, rows, heads or columns are split, never a sum.

What the operations take and give is in `layer_types` and `sampling_types`, what a backend may offer beside them in
`extensions`: all of it is imported from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from kernels.extensions import FusableLayer, FusedLayers, HostTier, LayerFusion, QuantizedLinears, SecondCopies
from kernels.layer_types import (
    AttentionPlan,
    AttentionSpec,
    GatedActivation,
    KVCache,
    KVCacheSpec,
    PackedLinear,
    QKNorm,
    RaggedBatch,
    RopeTable,
)
from kernels.partition import KV_PARTITION
from kernels.sampling_types import Logprobs, Samples, SamplingBatch, splitmix64, uniforms

__all__ = [
    "KV_PARTITION",
    "AttentionPlan",
    "AttentionSpec",
    "Backend",
    "BackendInfo",
    "BackendName",
    "FusableLayer",
    "FusedLayers",
    "GatedActivation",
    "HostTier",
    "KVCache",
    "KVCacheSpec",
    "LayerFusion",
    "Logprobs",
    "PackedLinear",
    "QKNorm",
    "QuantizedLinears",
    "RaggedBatch",
    "RopeTable",
    "Samples",
    "SamplingBatch",
    "SecondCopies",
    "splitmix64",
    "uniforms",
]

BackendName = Literal["reference", "cpu", "triton"]


@dataclass(frozen=True)
class BackendInfo:
    """What a backend is, for logs, receipts and the numerics fingerprint."""

    name: BackendName
    # The code path inside the backend, such as "avx512_bf16"; part of the numerics fingerprint.
    variant: str
    batch_invariant: bool
    # Why not, when `batch_invariant` is false.
    invariance_note: str = ""
    # How matrices are kept, such as "bfloat16", for the log: it changes no bit. Empty: nothing is packed yet.
    kept_weights: str = ""
    # Bytes of second copies of matrices (`SecondCopies`); while some are still to be made, what they will take at most.
    copy_bytes: int = 0
    # Bytes that matrices take less than in the type that they came in.
    saved_bytes: int = 0


class Backend(Protocol):
    """One implementation of every operation. Stateless but for its thread pool and device."""

    @property
    def info(self) -> BackendInfo: ...

    def set_num_threads(self, num_threads: int) -> None:
        """From the next call on; changes no result. Raises ValueError below 1. For the thread that computes."""
        ...

    # KV cache

    def allocate_kv_cache(self, spec: KVCacheSpec) -> KVCache:
        """A zeroed cache. Raises MemoryError (or torch.OutOfMemoryError) naming the bytes when it does not fit."""
        ...

    def copy_blocks(self, src: KVCache, src_ids: Sequence[int], dst: KVCache, dst_ids: Sequence[int]) -> None:
        """Copies whole blocks, all layers, src_ids[i] to dst_ids[i]. `src` and `dst` may be the same cache.

        Raises ValueError when the lists differ in length, an id is out of range or the specs are not the same shape.
        """
        ...

    def export_blocks(self, cache: KVCache, layer: int, block_ids: Sequence[int]) -> Tensor:
        """The blocks' contents of one layer in the canonical layout [2 (K, V), block, kv_head, token, dim]; a copy."""
        ...

    def import_blocks(self, cache: KVCache, layer: int, block_ids: Sequence[int], blocks: Tensor) -> None:
        """Writes blocks given in the canonical layout; the inverse of export_blocks."""
        ...

    # Attention

    def plan_attention(self, batch: RaggedBatch, cache: KVCache) -> AttentionPlan:
        """Derives what the layers of this step share. Validates shapes and ranges; raises ValueError naming the row."""
        ...

    def rope_write_kv(
        self,
        qkv: Tensor,
        cache: KVCache,
        layer: int,
        plan: AttentionPlan,
        rope: RopeTable,
        qk_norm: QKNorm | None,
    ) -> None:
        """Normalises (when given) and rotates queries in place; normalises, rotates and stores keys; stores values.

        `qkv` is [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], contiguous: query, key and value
        heads. The norm and the rotation are computed in fp32 and rounded once each.
        """
        ...

    def attention(self, qkv: Tensor, cache: KVCache, layer: int, plan: AttentionPlan, spec: AttentionSpec) -> Tensor:
        """Causal attention of every token's (already rotated) query over its row's cached positions.

        `qkv` as in rope_write_kv, after it. Returns [num_tokens, num_heads * head_dim] in qkv's dtype. Scores,
        softmax and sums are fp32.
        """
        ...

    # Dense layers

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """Packs [out_features, in_features] (and [out_features]) once. The caller drops its own reference."""
        ...

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """x @ weight.T + bias for x [num_tokens, in_features] of the weight's dtype; [num_tokens, out_features]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) * weight over the last dimension of [num_tokens, hidden], in fp32, rounded once."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x in place (rounded to its dtype), then rms_norm of the rounded residual."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up for gate_up [num_tokens, 2 * width], gate first; fp32 inside; [num_tokens, width]."""
        ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """gelu(gate) * up as silu_mul, with the tanh form of GELU: x / 2 * (1 + tanh(√(2/π) (x + 0.044715 x³)))."""
        ...

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap) of [rows, columns], any float dtype, in fp32 and not rounded from it."""
        ...

    # Sampling

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Samples:
        """Chooses one token per row of [B, padded_vocab], any float dtype, left unchanged; see SamplingBatch."""
        ...

    def logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int, vocab_size: int) -> Logprobs:
        """Logprobs of given tokens [L] int64 under the rows of [L, padded_vocab]: for prompt logprobs."""
        ...
