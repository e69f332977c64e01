"""The kernel API: every operation on tensors that a model step needs, whoever implements it.

Knows tensors, the paged KV cache and one step's ragged batch. Knows no sequences, plans, slots or models. A `Backend`
is one implementation: `kernels.reference` (plain torch, slow, the oracle), `kernels.cpu` (C++), `kernels.triton`
(CUDA). All give the results described here; the tests hold each against the reference.

Batch invariance. A backend whose `info.batch_invariant` is true gives each row of each operation bitwise the same
result whatever the other rows are, however many there are, however a prompt was cut into chunks and with any number of
threads: no reduction order may depend on those. Attention reduces over absolutely aligned partitions of `KV_PARTITION`
positions, combined in ascending order; K and V are always read back from the cache at its precision, also by the chunk
that wrote them; where rows are split over threads, rows, heads or columns are split, never a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

# Attention sums over KV positions [i * 256, (i + 1) * 256), then over i: a constant of the numerics, not the cache's.
KV_PARTITION = 256

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


@dataclass(frozen=True)
class KVCacheSpec:
    """Shape of a paged KV cache: `num_blocks` blocks of `block_size` token positions in each of `num_layers` layers."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    # Of an fp8 cache: what each layer's keys and values are divided by when stored and multiplied by when read, as
    # checkpoints give it. None: 1 everywhere.
    scales: tuple[tuple[float, float], ...] | None = None

    def layer_scales(self, layer: int) -> tuple[float, float]:
        """The scales of a layer's keys and values."""
        return (1.0, 1.0) if self.scales is None else self.scales[layer]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block's keys and values over all layers."""
        elements = 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim
        return elements * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.num_blocks * self.bytes_per_block


class KVCache(Protocol):
    """Key and value memory. The layout is the backend's own; only the backend that allocated it may look inside."""

    @property
    def spec(self) -> KVCacheSpec: ...


@dataclass(frozen=True)
class RaggedBatch:
    """The rows of one step: row r runs tokens [query_starts[r], query_starts[r + 1]) of the step's token dimension.

    A row's tokens are the last ones of its context: the first of them has position context_lens[r] - (its token count).
    Prefill chunks and decode rows differ only in their token counts. Integer tensors are int32, contiguous, and on the
    backend's device.
    """

    # [num_rows + 1]; starts at 0, ends at num_tokens, strictly ascending.
    query_starts: Tensor
    # [num_rows]; tokens of the sequence whose KV is in the cache once this step has run.
    context_lens: Tensor
    # [num_rows, max_blocks]; row r's first ceil(context_lens[r] / block_size) entries are valid.
    block_tables: Tensor
    # [num_tokens]; position of each token in its sequence.
    positions: Tensor
    num_rows: int
    num_tokens: int
    max_query_len: int
    max_context_len: int


class AttentionPlan(Protocol):
    """What a backend derives from a RaggedBatch once per step and uses in every layer."""

    @property
    def batch(self) -> RaggedBatch: ...


@dataclass(frozen=True)
class RopeTable:
    """Rotary embedding, half-split style: dimension i of the first half pairs with i of the second.

    `cos` and `sin` are fp32 [max_positions, rotary_dim / 2], any attention scaling factor already multiplied in. The
    first rotary_dim dimensions of a head are rotated, the rest pass through.
    """

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class QKNorm:
    """RMS norms over head_dim applied to each query and key head before rotation (Qwen3, Gemma 3)."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


@dataclass(frozen=True)
class AttentionSpec:
    """How one layer attends. Causal always: position p sees positions 0..p."""

    num_heads: int
    # Multiplies q·k; usually head_dim ** -0.5.
    scale: float
    # Sees only the last `window` positions, its own included. None: all.
    window: int | None = None
    # Scores become soft_cap * tanh(score / soft_cap). None: unchanged.
    soft_cap: float | None = None


class PackedLinear(Protocol):
    """A weight matrix in the backend's own layout."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...


@dataclass(frozen=True)
class SamplingBatch:
    """How the next token of each of B rows is chosen. Tensors on the backend's device.

    Ragged lists are (starts [B + 1] int32, values): row r owns values[starts[r]:starts[r + 1]].

    Order of application (the logits are taken in fp32): logit bias; repetition, frequency, presence penalty; forbidden
    ids; temperature; top-k; top-p; min-p. Only ids below `vocab_size` take part. Everywhere ties go to the lowest id:
    "likelier" orders by (logit descending, id ascending). top-p keeps the shortest prefix of that order, after top-k
    and renormalised over what top-k kept, whose probability reaches top_p. min-p keeps tokens whose probability is at
    least min_p times the likeliest's. The likeliest token is always kept.

    Choice: temperature 0 takes the likeliest token; otherwise the kept token with the highest logit / T + Gumbel(u)
    (Gumbel-max, equal to sampling from the softmax), with u = `uniforms(seed, position, id)`.
    """

    temperatures: Tensor  # [B] fp32
    top_ks: Tensor  # [B] int32, 0 is off
    top_ps: Tensor  # [B] fp32, 1 is off
    min_ps: Tensor  # [B] fp32, 0 is off
    seeds: Tensor  # [B] int64, the bits of the unsigned seed
    positions: Tensor  # [B] int64: position in the sequence of the token to be chosen
    repetition_penalties: Tensor  # [B] fp32, 1 is off
    frequency_penalties: Tensor  # [B] fp32, 0 is off
    presence_penalties: Tensor  # [B] fp32, 0 is off
    # Prompt ids, then output ids, of rows that have a penalty; empty for the others. Values int32.
    history_starts: Tensor
    history_ids: Tensor
    # [B] int32: how many of the row's history ids are the prompt's.
    history_prompt_lens: Tensor
    # Logit bias: ids int32, values fp32.
    bias_starts: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    # Ids that may not be chosen. Values int32.
    forbidden_starts: Tensor
    forbidden_ids: Tensor
    # [L] int32, ascending: the rows whose logprobs are wanted.
    logprob_rows: Tensor
    # Alternatives to report for each of those rows: the largest number any of them asked for.
    num_top: int
    # The real vocabulary; logits at or above it are padding.
    vocab_size: int


@dataclass(frozen=True)
class Logprobs:
    """Natural logs of the softmax of the raw fp32 logits over the real vocabulary, for L rows."""

    token_logprobs: Tensor  # [L] fp32: of the given or chosen token
    top_ids: Tensor  # [L, num_top] int32: likeliest first, ties by lowest id
    top_logprobs: Tensor  # [L, num_top] fp32


@dataclass(frozen=True)
class Samples:
    """The chosen tokens of B rows."""

    token_ids: Tensor  # [B] int64
    # [B] bool: false where the row's raw logits below vocab_size held NaN or infinity; its token id is meaningless.
    finite: Tensor
    # Of `logprob_rows`, in their order; None when there are none.
    logprobs: Logprobs | None


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


# What gates an MLP: `silu_mul` or `gelu_mul`.
GatedActivation = Literal["silu", "gelu_tanh"]


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

        The layers are the cache's first. Raises ValueError for tensors that do not fit them.
        """
        ...


@runtime_checkable
class LayerFusion(Protocol):
    """What a backend may offer beside `Backend`: many layers without a call, a check and a tensor for each kernel."""

    def fuse_layers(
        self, layers: Sequence[FusableLayer], eps: float, activation: GatedActivation
    ) -> FusedLayers | None:
        """`eps` is that of all norms but the heads'. None where it has no such path for these weights."""
        ...


def uniforms(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """The uniform numbers of Gumbel-max sampling: fp32 in (0, 1), one per id of an int64 tensor.

    A counter-based hash, so that a token's number depends on nothing but the request's seed, the position and the id:
    two rounds of the 32-bit finalizer `lowbias32` (C. Wellons, "Prospecting for Hash Functions", 2018) keyed by the
    halves of a splitmix64 (S. Vigna) of seed and position. 23 bits plus a half, so 0 and 1 cannot occur in fp32. Every
    backend computes exactly these numbers; this is the definition and the oracle.
    """
    key = splitmix64((seed + 0x9E3779B97F4A7C15 * (position + 1)) & 0xFFFFFFFFFFFFFFFF)
    x = _lowbias32(token_ids.to(torch.int64) ^ (key & 0xFFFFFFFF))
    x = _lowbias32(x ^ (key >> 32))
    return ((x >> 9).to(torch.float64).add_(0.5).mul_(2.0**-23)).to(torch.float32)


def splitmix64(x: int) -> int:
    """The output function of splitmix64 on a 64-bit unsigned integer."""
    mask = 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def _lowbias32(x: Tensor) -> Tensor:
    """lowbias32 on uint32 values held in int64, whose products of 32-bit factors wrap harmlessly above bit 32."""
    mask = 0xFFFFFFFF
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & mask
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & mask
    return x ^ (x >> 16)
