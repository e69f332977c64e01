"""What a decoder is, as numbers: frozen, complete, and all that the forward pass knows of its family.

Knows no field names of any config file (see families.py), no tensors and no kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.model_families import ModelConfigError

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class LinearScaling:
    """Every position is divided by `factor` (position interpolation)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Long wavelengths are divided by `factor`, short ones kept, those between blended (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class DynamicScaling:
    """The base grows with the length served beyond the original one ("dynamic NTK")."""

    factor: float
    original_max_positions: int


@dataclass(frozen=True)
class YarnScaling:
    """Pairs of few turns within the original length are interpolated, those of many kept (YaRN)."""

    factor: float
    original_max_positions: int
    # Turns within the original length: more than `beta_fast` are kept, fewer than `beta_slow` interpolated.
    beta_fast: float
    beta_slow: float
    # The ramp between them begins and ends at whole pairs.
    truncate: bool
    # Multiplies cosines and sines.
    attention_factor: float


@dataclass(frozen=True)
class LongRopeScaling:
    """Each pair's wavelength has a factor of its own, one within the original length and one beyond it (LongRoPE)."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_positions: int
    # Multiplies cosines and sines.
    attention_factor: float


RopeScaling = LinearScaling | Llama3Scaling | DynamicScaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: the first `rotary_dim` dimensions of each head turn at frequencies from `theta`."""

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None

    def depends_on_length(self) -> bool:
        """Whether the table depends on the longest sequence that the worker is configured for."""
        return isinstance(self.scaling, DynamicScaling | LongRopeScaling)


@dataclass(frozen=True)
class LayerView:
    """What one layer's attention sees: how many positions (None: all), and how they are turned."""

    window: int | None
    rope: RopeConfig


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer with gated MLPs, RMS norms, rotary positions and grouped-query attention."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    # Rows of the embedding; the tokenizer may know fewer tokens, the surplus is padding.
    num_embedding_rows: int
    max_positions: int
    norm_eps: float
    layers: tuple[LayerView, ...]
    # The output head is the embedding.
    tied_embeddings: bool
    activation: Activation
    # Multiplies q·k.
    attention_scale: float
    # Bias vectors on the query, key and value projections, on the output projection, on the MLP.
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    # RMS norms over each query and key head.
    qk_norm: bool = False
    # Norms after attention and after the MLP, before their sums with the residual.
    post_norms: bool = False
    # The checkpoint's norms multiply by this plus their weight.
    norm_offset: float = 0.0
    # The checkpoint holds query, key, value in one matrix, and gate, up in one.
    fused_projections: bool = False
    # Multiplies the embedding's rows.
    embedding_scale: float = 1.0
    # cap * tanh(x / cap) of attention scores and of the output's logits. None: none.
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelConfigError(
                f"config.json: num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads "
                f"{self.num_kv_heads}"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def qkv_width(self) -> int:
        """Columns of the fused query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The distinct rotary embeddings of the layers, in the order of their first use."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers))

    @property
    def depends_on_length(self) -> bool:
        """Whether answers depend on the longest sequence that the worker is configured for."""
        return any(rope.depends_on_length() for rope in self.ropes)
