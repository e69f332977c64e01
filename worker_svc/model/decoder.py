"""The forward pass of a decoder-only transformer over one ragged step.

Knows the configuration, the weights and the kernel API. Knows no sequences, slots or sampling: it is told which tokens'
logits are wanted, and computes nothing for the others that a later step could not read from the KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.api import AttentionPlan, AttentionSpec, Backend, KVCache, PackedLinear, QKNorm, RopeTable
from worker_svc.model.config import ModelConfig, RopeConfig
from worker_svc.model.names import DecoderNames
from worker_svc.model.rope import rope_table

# Hands a tensor over by its checkpoint name and forgets it, so that packing a layer frees the layer's originals.
TakeTensor = Callable[[str], Tensor]


@dataclass(frozen=True)
class DecoderLayer:
    """One layer's packed weights. `qkv` and `gate_up` are fused: query, key, value and gate, up, in that order.

    The `_out_norm`s are None in families that have no norm between a block and its sum with the residual.
    """

    input_norm: Tensor
    qkv: PackedLinear
    qk_norm: QKNorm | None
    rope: RopeTable
    attention: AttentionSpec
    output: PackedLinear
    attention_out_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear
    mlp_out_norm: Tensor | None


@dataclass(frozen=True)
class DecoderWeights:
    """All weights, packed for one backend. The embedding's rows are scaled already, the head is not."""

    embedding: Tensor
    layers: tuple[DecoderLayer, ...]
    final_norm: Tensor
    head: PackedLinear


class Decoder:
    """A pre-norm decoder: x += attention(norm(x)); x += mlp(norm(x)); logits = head(norm(x)).

    Some families norm what attention and MLP give, too. The sums of the residual are fused with the norms that follow
    them.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights, backend: Backend) -> None:
        self.config = config
        self._weights = weights
        self._kernels = backend
        self._gated = backend.gelu_mul if config.activation == "gelu_tanh" else backend.silu_mul

    def forward(self, token_ids: Tensor, plan: AttentionPlan, cache: KVCache, wanted: Tensor | None) -> Tensor:
        """Writes the tokens' keys and values to the cache; returns the wanted tokens' normed hidden states.

        `token_ids` is [num_tokens] int64; `wanted` [W] int64 indexes it (None: every token, which costs no gather).
        Returns [W, hidden_size], ready for `logits`.
        """
        kernels, eps = self._kernels, self.config.norm_eps
        residual = self.embed(token_ids)
        x = kernels.rms_norm(residual, self._weights.layers[0].input_norm, eps)
        last = len(self._weights.layers) - 1
        for index, layer in enumerate(self._weights.layers):
            qkv = kernels.linear(x, layer.qkv)
            kernels.rope_write_kv(qkv, cache, index, plan, layer.rope, layer.qk_norm)
            if index == last and wanted is not None and wanted.numel() == 0:
                return residual[:0]
            attended = kernels.attention(qkv, cache, index, plan, layer.attention)
            if index == last and wanted is not None:
                # Nothing after the last attention mixes tokens, so the unwanted ones stop here.
                attended, residual = attended[wanted], residual[wanted]
            x = self._normed(kernels.linear(attended, layer.output), layer.attention_out_norm)
            x = kernels.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = kernels.linear(self._gated(kernels.linear(x, layer.gate_up)), layer.down)
            x = self._normed(x, layer.mlp_out_norm)
            next_norm = self._weights.final_norm if index == last else self._weights.layers[index + 1].input_norm
            x = kernels.add_rms_norm(x, residual, next_norm, eps)
        return x

    def embed(self, token_ids: Tensor) -> Tensor:
        """The embedding's rows, scaled, [len(token_ids), hidden_size]; a copy."""
        return self._weights.embedding[token_ids]

    def logits(self, hidden: Tensor) -> Tensor:
        """[W, num_embedding_rows] for hidden states [W, hidden_size]; W at least 1. Soft-capped where the model is."""
        logits = self._kernels.linear(hidden, self._weights.head)
        cap = self.config.logit_soft_cap
        return logits if cap is None else self._kernels.soft_cap(logits, cap)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self._kernels.rms_norm(x, weight, self.config.norm_eps)


def build_decoder(config: ModelConfig, take: TakeTensor, backend: Backend, max_model_len: int) -> Decoder:
    """Packs the weights layer by layer; each tensor is taken exactly once."""
    names = DecoderNames(config)
    embedding = _kept(take(names.embedding))
    # Layers that turn alike share a table: it grows with max_model_len.
    ropes = {rope: rope_table(rope, max_model_len) for rope in config.ropes}
    layers = tuple(_build_layer(config, names, index, take, backend, ropes) for index in range(config.num_layers))
    weights = DecoderWeights(
        embedding=embedding if config.embedding_scale == 1.0 else _scaled(embedding, config.embedding_scale),
        layers=layers,
        final_norm=_norm(config, take(names.final_norm)),
        head=backend.pack_linear(embedding if config.tied_embeddings else take(names.head), None),
    )
    return Decoder(config, weights, backend)


def _build_layer(
    config: ModelConfig,
    names: DecoderNames,
    index: int,
    take: TakeTensor,
    backend: Backend,
    ropes: Mapping[RopeConfig, RopeTable],
) -> DecoderLayer:
    layer, view = names.layer(index), config.layers[index]

    def packed(projections: tuple[str, ...], has_bias: bool) -> PackedLinear:
        weight = _stack([take(f"{name}.weight") for name in projections])
        bias = _stack([take(f"{name}.bias") for name in projections]) if has_bias else None
        return backend.pack_linear(weight, bias)

    def norm(name: str) -> Tensor:
        return _norm(config, take(name))

    return DecoderLayer(
        input_norm=norm(layer.input_norm),
        qkv=packed(layer.qkv, config.qkv_bias),
        qk_norm=QKNorm(norm(layer.q_norm), norm(layer.k_norm), config.norm_eps) if config.qk_norm else None,
        rope=ropes[view.rope],
        attention=AttentionSpec(config.num_heads, config.attention_scale, view.window, config.attention_soft_cap),
        output=packed((layer.output,), config.output_bias),
        attention_out_norm=norm(layer.attention_out_norm) if config.post_norms else None,
        mlp_norm=norm(layer.mlp_norm),
        gate_up=packed(layer.gate_up, config.mlp_bias),
        down=packed((layer.down,), config.mlp_bias),
        mlp_out_norm=norm(layer.mlp_out_norm) if config.post_norms else None,
    )


def _norm(config: ModelConfig, weight: Tensor) -> Tensor:
    """A norm's factor. One plus a small weight has more digits than 16-bit floats keep: it stays in fp32."""
    return _kept(weight) if config.norm_offset == 0.0 else weight.float() + config.norm_offset


def _scaled(embedding: Tensor, scale: float) -> Tensor:
    """The embedding's rows times a scale that is rounded to their dtype first, as Gemma was trained; a copy."""
    return embedding * torch.tensor(scale, dtype=embedding.dtype)


def _kept(tensor: Tensor) -> Tensor:
    """A tensor that is used as it is, copied: it may be a view of a mapped file, and would keep all of it in memory."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _stack(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
