"""Names and shapes of a decoder's tensors in a Hugging Face checkpoint.

The one place that knows them: loading checks the checkpoint against `expected_shapes`, the decoder takes by its names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from worker_svc.model.config import ModelConfig

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LayerNames:
    """One layer's tensors. Projections are named without `.weight` or `.bias`."""

    prefix: str
    config: ModelConfig

    @property
    def input_norm(self) -> str:
        return f"{self.prefix}.input_layernorm.weight"

    @property
    def qkv(self) -> tuple[str, ...]:
        parts = ("qkv",) if self.config.fused_projections else ("q", "k", "v")
        return tuple(f"{self.prefix}.self_attn.{part}_proj" for part in parts)

    @property
    def q_norm(self) -> str:
        return f"{self.prefix}.self_attn.q_norm.weight"

    @property
    def k_norm(self) -> str:
        return f"{self.prefix}.self_attn.k_norm.weight"

    @property
    def output(self) -> str:
        return f"{self.prefix}.self_attn.o_proj"

    @property
    def attention_out_norm(self) -> str:
        """Where the config has `post_norms`; elsewhere the same name is `mlp_norm`'s."""
        return f"{self.prefix}.post_attention_layernorm.weight"

    @property
    def mlp_norm(self) -> str:
        norm = "pre_feedforward_layernorm" if self.config.post_norms else "post_attention_layernorm"
        return f"{self.prefix}.{norm}.weight"

    @property
    def mlp_out_norm(self) -> str:
        """Where the config has `post_norms`."""
        return f"{self.prefix}.post_feedforward_layernorm.weight"

    @property
    def gate_up(self) -> tuple[str, ...]:
        parts = ("gate_up",) if self.config.fused_projections else ("gate", "up")
        return tuple(f"{self.prefix}.mlp.{part}_proj" for part in parts)

    @property
    def down(self) -> str:
        return f"{self.prefix}.mlp.down_proj"


@dataclass(frozen=True)
class DecoderNames:
    """Every tensor of one decoder."""

    config: ModelConfig
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"

    def layer(self, index: int) -> LayerNames:
        return LayerNames(f"model.layers.{index}", self.config)


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor that the decoder takes, with its shape; a tied head is not among them."""
    names = DecoderNames(config)
    table: Shape = (config.num_embedding_rows, config.hidden_size)
    shapes = {names.embedding: table, names.final_norm: (config.hidden_size,)}
    if not config.tied_embeddings:
        shapes[names.head] = table
    for index in range(config.num_layers):
        shapes.update(_layer_shapes(config, names.layer(index)))
    return shapes


def layer_vector_items(config: ModelConfig) -> int:
    """Items of one layer's norms and biases."""
    return sum(shape[0] for _, shape in _layer_shapes(config, DecoderNames(config).layer(0)) if len(shape) == 1)


def _layer_shapes(config: ModelConfig, layer: LayerNames) -> Iterator[tuple[str, Shape]]:
    hidden, width = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield layer.input_norm, (hidden,)
    yield layer.mlp_norm, (hidden,)
    if config.post_norms:
        yield layer.attention_out_norm, (hidden,)
        yield layer.mlp_out_norm, (hidden,)
    if config.qk_norm:
        yield layer.q_norm, (config.head_dim,)
        yield layer.k_norm, (config.head_dim,)
    qkv_rows = (config.qkv_width,) if config.fused_projections else (q_width, kv_width, kv_width)
    for name, rows in zip(layer.qkv, qkv_rows, strict=True):
        yield from _projection(name, rows, hidden, config.qkv_bias)
    yield from _projection(layer.output, hidden, q_width, config.output_bias)
    for name in layer.gate_up:
        yield from _projection(name, 2 * width // len(layer.gate_up), hidden, config.mlp_bias)
    yield from _projection(layer.down, hidden, width, config.mlp_bias)


def _projection(name: str, num_rows: int, num_columns: int, has_bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (num_rows, num_columns)
    if has_bias:
        yield f"{name}.bias", (num_rows,)
