"""The forward pass of a decoder-only transformer over one ragged step.

Knows the configuration, the weights and the kernel API. Knows no sequences, slots or sampling: it is told which tokens'
logits are wanted, and computes nothing for the others that a later step could not read from the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.api import (
    AttentionPlan,
    AttentionSpec,
    Backend,
    FusableLayer,
    FusedLayers,
    KVCache,
    LayerFusion,
    QKNorm,
    RopeTable,
)
from worker_svc.model.config import ModelConfig
from worker_svc.model.layers import ColumnLinear, DividedEmbedding, Embedding, RowLinear


@dataclass(frozen=True)
class DecoderLayer:
    """One layer as one rank has it. `qkv` and `gate_up` are fused: query, key, value and gate, up, in that order.

    The `_out_norm`s are None in families that have no norm between a block and its sum with the residual.
    """

    input_norm: Tensor
    qkv: ColumnLinear
    qk_norm: QKNorm | None
    rope: RopeTable
    attention: AttentionSpec
    output: RowLinear
    attention_out_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: ColumnLinear
    down: RowLinear
    mlp_out_norm: Tensor | None


@dataclass(frozen=True)
class DecoderWeights:
    """All weights, packed for one backend. The embedding's rows are scaled already, the head is not."""

    embedding: Embedding | DividedEmbedding
    layers: tuple[DecoderLayer, ...]
    final_norm: Tensor
    head: ColumnLinear


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
        self._fused = self._fuse_layers()

    def forward(self, token_ids: Tensor, plan: AttentionPlan, cache: KVCache, wanted: Tensor | None) -> Tensor:
        """Writes the tokens' keys and values to the cache; returns the wanted tokens' normed hidden states.

        `token_ids` is [num_tokens] int64; `wanted` [W] int64 indexes it (None: every token, which costs no gather).
        Returns [W, hidden_size], ready for `logits`.
        """
        kernels, eps = self._kernels, self.config.norm_eps
        residual = self.embed(token_ids)
        x = kernels.rms_norm(residual, self._weights.layers[0].input_norm, eps)
        last = len(self._weights.layers) - 1
        num_fused = 0 if self._fused is None else last + (wanted is None)
        if self._fused is not None and num_fused:
            self._fused(num_fused, x, residual, cache, plan)
        for index in range(num_fused, last + 1):
            layer = self._weights.layers[index]
            qkv = layer.qkv(x)
            kernels.rope_write_kv(qkv, cache, index, plan, layer.rope, layer.qk_norm)
            if index == last and wanted is not None and wanted.numel() == 0:
                return residual[:0]
            attended = kernels.attention(qkv, cache, index, plan, layer.attention)
            if index == last and wanted is not None:
                # Nothing after the last attention mixes tokens, so the unwanted ones stop here.
                attended, residual = attended[wanted], residual[wanted]
            x = self._normed(layer.output(attended), layer.attention_out_norm)
            x = kernels.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = layer.down(self._gated(layer.gate_up(x)))
            x = self._normed(x, layer.mlp_out_norm)
            x = kernels.add_rms_norm(x, residual, self._next_norm(index), eps)
        return x

    def embed(self, token_ids: Tensor) -> Tensor:
        """The embedding's rows, scaled, [len(token_ids), hidden_size]; a copy."""
        return self._weights.embedding(token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """[W, num_embedding_rows], the rank's own, for hidden states [W, hidden_size]; W at least 1. Soft-capped."""
        logits = self._weights.head(hidden)
        cap = self.config.logit_soft_cap
        return logits if cap is None else self._kernels.soft_cap(logits, cap)

    def _next_norm(self, index: int) -> Tensor:
        """The norm of what layer `index` gives."""
        layers = self._weights.layers
        return self._weights.final_norm if index == len(layers) - 1 else layers[index + 1].input_norm

    def _fuse_layers(self) -> FusedLayers | None:
        """All layers as one call, where nothing passes between ranks inside them and the kernels have it."""
        layers = self._weights.layers
        if not isinstance(self._kernels, LayerFusion) or any(layer.output.group.size > 1 for layer in layers):
            return None
        fusable = [
            FusableLayer(
                qkv=layer.qkv.packed,
                qk_norm=layer.qk_norm,
                rope=layer.rope,
                attention=layer.attention,
                output=layer.output.packed,
                attention_out_norm=layer.attention_out_norm,
                mlp_norm=layer.mlp_norm,
                gate_up=layer.gate_up.packed,
                down=layer.down.packed,
                mlp_out_norm=layer.mlp_out_norm,
                next_norm=self._next_norm(index),
            )
            for index, layer in enumerate(layers)
        ]
        return self._kernels.fuse_layers(fusable, self.config.norm_eps, self.config.activation)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self._kernels.rms_norm(x, weight, self.config.norm_eps)
