"""From a checkpoint's tensors to a decoder: a rank's weights, stacked where projections are one product, and packed.

Layer by layer, each tensor taken when it is packed. Knows names, the kernel API and quantized weights; reads no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from kernels.api import AttentionSpec, Backend, PackedLinear, QKNorm, QuantizedLinears, RopeTable
from kernels.quantized import QuantizedWeight, stack
from kernels.reference.quantized import dequantize
from worker_svc.model.config import ModelConfig, RopeConfig
from worker_svc.model.decoder import Decoder, DecoderLayer, DecoderWeights
from worker_svc.model.layers import ColumnLinear, DividedEmbedding, Embedding, RowLinear, padded_rows
from worker_svc.model.names import DecoderNames
from worker_svc.model.rope import rope_table
from worker_svc.model.sharding import ModelShard
from worker_svc.parallel.group import TPGroup


class WeightSource(Protocol):
    """Hands a rank's tensors over by their checkpoint names, each once, and keeps none."""

    def take(self, name: str) -> Tensor:
        """In the precision that the model computes in."""
        ...

    def take_matrix(self, name: str) -> Tensor | QuantizedWeight:
        """A matrix as the checkpoint holds it; where that is not quantized, as `take` gives it."""
        ...


def build_decoder(
    shard: ModelShard,
    group: TPGroup,
    source: WeightSource,
    backend: Backend,
    max_model_len: int,
    place: torch.device | None = None,
) -> Decoder:
    """Packs a rank's weights layer by layer; each tensor that the shard expects is taken exactly once.

    Quantized matrices stay what they are where the backend is one of `QuantizedLinears`. `place` is where `take` gives
    tensors and the backend computes; None for the CPU.
    """
    names = DecoderNames(shard.whole)
    table = padded_rows(source.take(names.embedding), shard.config.num_embedding_rows)
    packer = MatrixPacker(source, backend, table.dtype, place)
    builder = _Builder(shard, group, packer, max_model_len, place)
    layers = tuple(builder.layer(index) for index in range(shard.whole.num_layers))
    weights = DecoderWeights(
        embedding=builder.embedding(table),
        layers=layers,
        final_norm=builder.norm(names.final_norm),
        head=builder.head(table if shard.whole.tied_embeddings else source.take(names.head)),
    )
    return Decoder(shard.config, weights, backend)


class MatrixPacker:
    """Takes matrices that are one product, and packs them."""

    def __init__(
        self, source: WeightSource, backend: Backend, dtype: torch.dtype, place: torch.device | None = None
    ) -> None:
        """`dtype` is what the model computes in."""
        self.source, self.backend = source, backend
        self._dtype, self._place = dtype, place

    def packed(self, projections: tuple[str, ...], bias: Tensor | None) -> PackedLinear:
        """The projections' outputs one below the other."""
        names = [f"{projection}.weight" for projection in projections]
        if not isinstance(self.backend, QuantizedLinears):
            return self.backend.pack_linear(_stack([self.source.take(name) for name in names]), bias)
        parts = [self.source.take_matrix(name) for name in names]
        quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
        stacked = stack(quantized) if len(quantized) == len(parts) else None
        if stacked is not None:
            return self.backend.pack_quantized(stacked, bias, self._dtype)
        # No one form holds them all: some are quantized otherwise, or not at all.
        return self.backend.pack_linear(_stack([self._as_float(part) for part in parts]), bias)

    def _as_float(self, part: Tensor | QuantizedWeight) -> Tensor:
        return part if isinstance(part, Tensor) else dequantize(part).to(self._dtype).to(self._place)


class _Builder:
    """Makes the layers of one rank's decoder."""

    def __init__(
        self,
        shard: ModelShard,
        group: TPGroup,
        packer: MatrixPacker,
        max_model_len: int,
        place: torch.device | None,
    ) -> None:
        self._shard = shard
        self._config = shard.config
        self._group = group
        self._packer = packer
        self._take = packer.source.take
        # Layers that turn alike share a table: it grows with max_model_len.
        self._ropes: Mapping[RopeConfig, RopeTable] = {
            rope: _placed(rope_table(rope, max_model_len), place) for rope in shard.config.ropes
        }

    def layer(self, index: int) -> DecoderLayer:
        config, view = self._config, self._config.layers[index]
        names = DecoderNames(config).layer(index)
        qk_norm = QKNorm(self.norm(names.q_norm), self.norm(names.k_norm), config.norm_eps) if config.qk_norm else None
        return DecoderLayer(
            input_norm=self.norm(names.input_norm),
            qkv=self._column(names.qkv, config.qkv_bias),
            qk_norm=qk_norm,
            rope=self._ropes[view.rope],
            attention=AttentionSpec(config.num_heads, config.attention_scale, view.window, config.attention_soft_cap),
            output=self._row(names.output, config.output_bias),
            attention_out_norm=self.norm(names.attention_out_norm) if config.post_norms else None,
            mlp_norm=self.norm(names.mlp_norm),
            gate_up=self._column(names.gate_up, config.mlp_bias),
            down=self._row(names.down, config.mlp_bias),
            mlp_out_norm=self.norm(names.mlp_out_norm) if config.post_norms else None,
        )

    def embedding(self, table: Tensor) -> Embedding | DividedEmbedding:
        """Scaled already, which the head is not."""
        scale = self._config.embedding_scale
        rows = _kept(table) if scale == 1.0 else _scaled(table, scale)
        if self._group.size == 1:
            return Embedding(rows)
        return DividedEmbedding(rows, self._shard.share.embedding_rows.start, self._group)

    def head(self, table: Tensor) -> ColumnLinear:
        rows = padded_rows(table, self._config.num_embedding_rows)
        backend = self._packer.backend
        return ColumnLinear(backend, backend.pack_linear(rows, None))

    def norm(self, name: str) -> Tensor:
        return _norm(self._config, self._take(name))

    def _column(self, projections: tuple[str, ...], has_bias: bool) -> ColumnLinear:
        bias = _stack([self._take(f"{name}.bias") for name in projections]) if has_bias else None
        return ColumnLinear(self._packer.backend, self._packer.packed(projections, bias))

    def _row(self, projection: str, has_bias: bool) -> RowLinear:
        """The bias is rank 0's, so added once."""
        bias = self._take(f"{projection}.bias") if has_bias else None
        packed = self._packer.packed((projection,), bias if self._group.rank == 0 else None)
        return RowLinear(self._packer.backend, packed, self._group)


def _placed(table: RopeTable, place: torch.device | None) -> RopeTable:
    return table if place is None else RopeTable(table.cos.to(place), table.sin.to(place))


def _norm(config: ModelConfig, weight: Tensor) -> Tensor:
    """A norm's factor. One plus a small weight has more digits than 16-bit floats keep: it stays in fp32."""
    return _kept(weight) if config.norm_offset == 0.0 else weight.float() + config.norm_offset


def _scaled(embedding: Tensor, scale: float) -> Tensor:
    """The embedding's rows times a scale that is rounded to their dtype first, as Gemma was trained; a copy."""
    return embedding * torch.tensor(scale, dtype=embedding.dtype)


def _kept(tensor: Tensor) -> Tensor:
    """A tensor that is used as it is; copied in main memory, where it may be a view of a mapped file and keep it all.

    On a card it is a copy already, which a head that is tied to the embedding shares.
    """
    return tensor.clone(memory_format=torch.contiguous_format) if tensor.device.type == "cpu" else tensor.contiguous()


def _stack(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
