"""The forward pass of a decoder-only transformer over one ragged step.

Knows the configuration, the weights and the kernel API. Knows no sequences, slots or sampling: it is told which tokens'
logits are wanted, and computes nothing for the others that a later step could not read from the KV cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.api import AttentionPlan, AttentionSpec, Backend, KVCache, PackedLinear, QKNorm, RopeTable
from worker_svc.model.config import ModelConfig
from worker_svc.model.names import DecoderNames
from worker_svc.model.rope import rope_table

# Hands a tensor over by its checkpoint name and forgets it, so that packing a layer frees the layer's originals.
TakeTensor = Callable[[str], Tensor]


@dataclass(frozen=True)
class DecoderLayer:
    """One layer's packed weights. `qkv` and `gate_up` are fused: query, key, value and gate, up, in that order."""

    input_norm: Tensor
    qkv: PackedLinear
    qk_norm: QKNorm | None
    attention: AttentionSpec
    output: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True)
class DecoderWeights:
    """All weights, packed for one backend."""

    embedding: Tensor
    layers: tuple[DecoderLayer, ...]
    final_norm: Tensor
    head: PackedLinear


class Decoder:
    """A pre-norm decoder: x += attention(norm(x)); x += mlp(norm(x)); logits = head(norm(x)).

    The sums of the residual are fused with the norms that follow them.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights, rope: RopeTable, backend: Backend) -> None:
        self.config = config
        self._weights = weights
        self._rope = rope
        self._kernels = backend

    def forward(self, token_ids: Tensor, plan: AttentionPlan, cache: KVCache, wanted: Tensor | None) -> Tensor:
        """Writes the tokens' keys and values to the cache; returns the wanted tokens' normed hidden states.

        `token_ids` is [num_tokens] int64; `wanted` [W] int64 indexes it (None: every token, which costs no gather).
        Returns [W, hidden_size], ready for `logits`.
        """
        kernels, eps = self._kernels, self.config.norm_eps
        residual = self._embed(token_ids)
        x = kernels.rms_norm(residual, self._weights.layers[0].input_norm, eps)
        last = len(self._weights.layers) - 1
        for index, layer in enumerate(self._weights.layers):
            qkv = kernels.linear(x, layer.qkv)
            kernels.rope_write_kv(qkv, cache, index, plan, self._rope, layer.qk_norm)
            if index == last and wanted is not None and wanted.numel() == 0:
                return residual[:0]
            attended = kernels.attention(qkv, cache, index, plan, layer.attention)
            if index == last and wanted is not None:
                # Nothing after the last attention mixes tokens, so the unwanted ones stop here.
                attended, residual = attended[wanted], residual[wanted]
            x = kernels.add_rms_norm(kernels.linear(attended, layer.output), residual, layer.mlp_norm, eps)
            x = kernels.linear(kernels.silu_mul(kernels.linear(x, layer.gate_up)), layer.down)
            next_norm = self._weights.final_norm if index == last else self._weights.layers[index + 1].input_norm
            x = kernels.add_rms_norm(x, residual, next_norm, eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[W, num_embedding_rows] for hidden states [W, hidden_size]; W at least 1."""
        return self._kernels.linear(hidden, self._weights.head)

    def _embed(self, token_ids: Tensor) -> Tensor:
        rows = self._weights.embedding[token_ids]
        scale = self.config.embedding_scale
        return rows if scale == 1.0 else rows * scale


def build_decoder(config: ModelConfig, take: TakeTensor, backend: Backend, max_model_len: int) -> Decoder:
    """Packs the weights layer by layer; each tensor is taken exactly once."""
    names = DecoderNames(config)
    embedding = _kept(take(names.embedding))
    layers = tuple(_build_layer(config, names, index, take, backend) for index in range(config.num_layers))
    weights = DecoderWeights(
        embedding=embedding,
        layers=layers,
        final_norm=_kept(take(names.final_norm)),
        head=backend.pack_linear(embedding if config.tied_embeddings else take(names.head), None),
    )
    return Decoder(config, weights, rope_table(config.rope, max_model_len), backend)


def _build_layer(
    config: ModelConfig, names: DecoderNames, index: int, take: TakeTensor, backend: Backend
) -> DecoderLayer:
    layer = names.layer(index)

    def packed(projections: tuple[str, ...], has_bias: bool) -> PackedLinear:
        weight = _stack([take(f"{name}.weight") for name in projections])
        bias = _stack([take(f"{name}.bias") for name in projections]) if has_bias else None
        return backend.pack_linear(weight, bias)

    return DecoderLayer(
        input_norm=_kept(take(layer.input_norm)),
        qkv=packed(layer.qkv, config.qkv_bias),
        qk_norm=QKNorm(_kept(take(layer.q_norm)), _kept(take(layer.k_norm)), config.norm_eps)
        if config.qk_norm
        else None,
        attention=AttentionSpec(config.num_heads, config.scale, config.window(index), config.attention_soft_cap),
        output=packed((layer.output,), config.output_bias),
        mlp_norm=_kept(take(layer.mlp_norm)),
        gate_up=packed(layer.gate_up, config.mlp_bias),
        down=packed((layer.down,), config.mlp_bias),
    )


def _kept(tensor: Tensor) -> Tensor:
    """A tensor that is used as it is, copied: it may be a view of a mapped file, and would keep all of it in memory."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _stack(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
