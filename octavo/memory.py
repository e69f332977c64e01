"""How much memory a model takes: weights, KV blocks, workspace, as arithmetic over its shape.

The checks predict with these functions before anything is loaded, and the worker allocates by the same ones.
Knows numbers alone: no file, no tensor; of the machine only what was collected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.machine import MachineFacts
from octavo.model_families import FAMILIES, Family, architecture_of, completed, longest_context, rope_parameters
from octavo.precision import DTYPE_BYTES, KV_DTYPE_BYTES
from octavo.sharding import DividedSizes, share_of

RUNTIME_BYTES = 300 * 2**20
"""Resident bytes of a worker beside its model: Python, torch, grpc, ZeroMQ, the tokenizer; measured."""

_GRAMMAR_BYTES_PER_TOKEN = 1024
"""What each token of a vocabulary takes once more for grammars: tokenizer, bytes and tree; measured."""

DEFAULT_TOKENS_PER_SEQUENCE = 1024
"""Context that the default KV pool allows each of `max_num_seqs` sequences at once."""

_LOGIT_COPIES = 4  # raw, processed, their log-softmax or noise, and the sort order of top-k and top-p


@dataclass(frozen=True)
class QuantizedPart:
    """The share of the layers' matrices whose weights stay quantized, and the bytes of one such weight with scales."""

    share: float
    item_bytes: float


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a decoder, or of one rank's part of it, that decide its memory."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    tied_embeddings: bool
    # Items of one layer's norms and biases.
    layer_vector_items: int
    # Items of one position in the rotary tables, cosines and sines of every distinct table.
    rope_position_items: int
    # Ranks that hold the model together; each has `vocab_size` rows of the tables, and rank 0 gathers all logits.
    num_ranks: int = 1
    # None where kernels take floats: then quantized weights are dequantized.
    quantized: QuantizedPart | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """From the fields of a Hugging Face config.json.

        Raises KeyError naming a field that is missing, ModelConfigError for an architecture that is not supported.
        """
        fields, family = completed(config), FAMILIES[architecture_of(config)]
        heads, hidden = int(fields["num_attention_heads"]), int(fields["hidden_size"])
        kv_heads = int(fields.get("num_key_value_heads") or heads)
        head_dim = int(fields.get("head_dim") or hidden // heads)
        return cls(
            num_layers=int(fields["num_hidden_layers"]),
            hidden_size=hidden,
            intermediate_size=int(fields["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=int(fields["vocab_size"]),
            max_model_len=longest_context(fields),
            tied_embeddings=bool(fields["tie_word_embeddings"]),
            layer_vector_items=_vector_items(fields, family, (heads + 2 * kv_heads) * head_dim, head_dim),
            rope_position_items=_rotary_dims(fields, family, head_dim),
        )

    @property
    def divided_sizes(self) -> DividedSizes:
        """The sizes that ranks divide."""
        return DividedSizes(self.num_heads, self.num_kv_heads, self.intermediate_size, self.vocab_size)

    def part(self, rank: int, num_ranks: int) -> ModelShape:
        """What one rank holds; its biases, which are small, are counted whole.

        Raises octavo.sharding.ShardingError where so many ranks cannot share the model.
        """
        sizes = share_of(self.divided_sizes, rank, num_ranks).sizes
        return replace(
            self,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            intermediate_size=sizes.intermediate_size,
            vocab_size=sizes.num_embedding_rows,
            num_ranks=num_ranks,
        )

    @property
    def num_parameters(self) -> int:
        """Weights and biases of embedding, layers, norms and, unless tied, the output head."""
        tables = (1 if self.tied_embeddings else 2) * self.vocab_size * self.hidden_size
        return self.num_matrix_weights + self.num_layers * self.layer_vector_items + self.hidden_size + tables

    @property
    def num_matrix_weights(self) -> int:
        """Of the layers' matrices."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    def kv_block_bytes(self, block_size: int, dtype: str) -> int:
        """Bytes of one block over all layers: keys and values of `block_size` tokens."""
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return per_token * block_size * KV_DTYPE_BYTES[dtype]

    def rope_bytes(self, max_model_len: int) -> int:
        """Bytes of the rotary tables, fp32, for sequences of up to `max_model_len` tokens."""
        return self.rope_position_items * max_model_len * 4

    def weight_bytes(self, dtype: str) -> int:
        """Most bytes of the weights as the worker holds them; rotary tables not counted.

        A tied output head is counted twice: the matrix product wants its own packed layout, while the
        embedding is read row by row. A float32 model whose matrices all fit 16 bits takes half for those. Quantized
        matrices are multiplied as they are by 16-bit activations alone.
        """
        tied = self.vocab_size * self.hidden_size if self.tied_embeddings else 0
        item_bytes = DTYPE_BYTES[dtype]
        saved = 0.0
        if self.quantized is not None and item_bytes == 2:
            saved = self.num_matrix_weights * self.quantized.share * (item_bytes - self.quantized.item_bytes)
        return (self.num_parameters + tied) * item_bytes - int(saved)

    @property
    def grammar_bytes(self) -> int:
        """Most bytes of main memory that a rank's view of the whole vocabulary takes, which grammars need."""
        return self.vocab_size * self.num_ranks * _GRAMMAR_BYTES_PER_TOKEN

    def workspace_bytes(self, max_num_seqs: int, max_num_batched_tokens: int, dtype: str) -> int:
        """Most bytes that one step's activations and logits take beside weights and KV.

        Logits are fp32 over the vocabulary for each sampled row. The widest moment of a layer holds residual,
        normed input, both halves of the MLP and their product for each row, and what the ranks of a group add up.
        """
        logits = _LOGIT_COPIES * max_num_seqs * self.vocab_size * self.num_ranks * 4
        row = 3 * self.hidden_size + 3 * self.intermediate_size + 2 * self.num_heads * self.head_dim
        if self.num_ranks > 1:
            row += (self.num_ranks + 2) * self.hidden_size
        return logits + max_num_batched_tokens * row * DTYPE_BYTES[dtype]


def _vector_items(fields: Mapping[str, Any], family: Family, qkv_width: int, head_dim: int) -> int:
    """Items of a layer's norms and biases."""
    hidden, intermediate = int(fields["hidden_size"]), int(fields["intermediate_size"])
    attention_bias, mlp_bias = (
        name in family.bias_flags and bool(fields.get(name)) for name in ("attention_bias", "mlp_bias")
    )
    return (
        (4 if family.post_norms else 2) * hidden
        + family.qk_norm * 2 * head_dim
        + (family.qkv_bias or attention_bias) * qkv_width
        + attention_bias * hidden
        + mlp_bias * (2 * intermediate + hidden)
    )


def _rotary_dims(fields: Mapping[str, Any], family: Family, head_dim: int) -> int:
    """Rotated dimensions of a head, summed over the distinct rotary tables."""
    fraction = rope_parameters(fields).get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
    return int(head_dim * float(fraction)) + family.local_rope * head_dim


@dataclass(frozen=True)
class KvRequest:
    """What was asked of the KV pool: the worker's options, as numbers. `max_model_len` is the resolved one."""

    block_size: int
    max_model_len: int
    max_num_seqs: int
    num_kv_blocks: int | None = None
    kv_cache_memory: int | None = None
    kv_memory_fraction: float = 0.5
    # Of the second tier, which is set aside before the pool gets its share.
    host_bytes: int = 0
    # "auto": what is computed in.
    kv_cache_dtype: str = "auto"

    def kv_dtype(self, dtype: str) -> str:
        """What keys and values are kept in where a model computes in `dtype`."""
        return dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype


@dataclass(frozen=True)
class KvPool:
    """The size of the KV pool, and the sentence that says where it comes from."""

    num_blocks: int
    block_size: int
    block_bytes: int
    reason: str

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


def size_kv_pool(request: KvRequest, block_bytes: int, free_bytes: int) -> KvPool:
    """The pool that a request gets where `free_bytes` are left after weights and workspace.

    The first of `num_kv_blocks`, `kv_cache_memory` and `kv_memory_fraction` that is given decides. By default
    the share of free memory is cut to what is useful: room for `max_num_seqs` sequences of
    DEFAULT_TOKENS_PER_SEQUENCE tokens, or for one of `max_model_len` where that is more. Never negative.
    """
    if request.num_kv_blocks is not None:
        return KvPool(request.num_kv_blocks, request.block_size, block_bytes, "--num-kv-blocks")
    if request.kv_cache_memory is not None:
        blocks = request.kv_cache_memory // block_bytes
        return KvPool(blocks, request.block_size, block_bytes, "--kv-cache-memory")
    useful_tokens = max(request.max_model_len, request.max_num_seqs * DEFAULT_TOKENS_PER_SEQUENCE)
    useful_blocks = -(-useful_tokens // request.block_size)
    share_blocks = max(0, int(free_bytes * request.kv_memory_fraction)) // block_bytes
    if useful_blocks <= share_blocks:
        reason = f"all that {request.max_num_seqs} sequences at once can be expected to use"
        return KvPool(useful_blocks, request.block_size, block_bytes, reason)
    reason = f"{request.kv_memory_fraction:.0%} of the memory left free by the weights"
    return KvPool(share_blocks, request.block_size, block_bytes, reason)


@dataclass(frozen=True)
class MemoryPrediction:
    """What a worker will hold, in bytes, by purpose; rotary tables count as weights."""

    runtime_bytes: int
    weight_bytes: int
    kv_bytes: int
    workspace_bytes: int
    host_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.runtime_bytes + self.weight_bytes + self.kv_bytes + self.workspace_bytes + self.host_bytes

    def __add__(self, other: MemoryPrediction) -> MemoryPrediction:
        return MemoryPrediction(
            self.runtime_bytes + other.runtime_bytes,
            self.weight_bytes + other.weight_bytes,
            self.kv_bytes + other.kv_bytes,
            self.workspace_bytes + other.workspace_bytes,
            self.host_bytes + other.host_bytes,
        )


def predict(
    shape: ModelShape,
    dtype: str,
    request: KvRequest,
    max_num_batched_tokens: int,
    free_bytes: int,
) -> tuple[MemoryPrediction, KvPool]:
    """Memory of a worker for this model, and the KV pool it gets, where `free_bytes` are free before it starts."""
    weights = shape.weight_bytes(dtype) + shape.rope_bytes(request.max_model_len)
    workspace = shape.workspace_bytes(request.max_num_seqs, max_num_batched_tokens, dtype)
    runtime = RUNTIME_BYTES + shape.grammar_bytes
    left = free_bytes - runtime - weights - workspace - request.host_bytes
    pool = size_kv_pool(request, shape.kv_block_bytes(request.block_size, request.kv_dtype(dtype)), left)
    return MemoryPrediction(runtime, weights, pool.num_bytes, workspace, request.host_bytes), pool


def predict_ranks(
    parts: Sequence[ModelShape], dtype: str, request: KvRequest, max_num_batched_tokens: int, machine: MachineFacts
) -> tuple[MemoryPrediction, KvPool]:
    """Memory of the ranks on this machine, all of them together, and the KV pool that each of them gets.

    `parts` are what the ranks hold. Options of size count for each rank, and each has an even share of the machine's
    free memory. The pool has as many blocks as the rank with the least room for them.
    """
    free_bytes = machine.free_memory_bytes // len(parts)
    found = [predict(part, dtype, request, max_num_batched_tokens, free_bytes) for part in parts]
    num_blocks = min(pool.num_blocks for _, pool in found)
    each = [replace(memory, kv_bytes=num_blocks * pool.block_bytes) for memory, pool in found]
    largest = max((pool for _, pool in found), key=lambda pool: pool.block_bytes)
    return sum(each[1:], each[0]), replace(largest, num_blocks=num_blocks)
