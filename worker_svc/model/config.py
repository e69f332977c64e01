"""What a decoder is, as numbers: read from a checkpoint's config.json, checked, frozen.

Knows the field names of Hugging Face configs and how families differ. Knows no tensors, files or kernels: a family that
differs in data alone (biases, norms on heads, windows, caps) is a function here and nothing elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class ModelConfigError(ValueError):
    """A config.json that cannot be served; the message names the field, its value and what is supported."""


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
class RopeConfig:
    """Rotary embedding: the first `rotary_dim` dimensions of each head turn at frequencies from `theta`."""

    theta: float
    rotary_dim: int
    scaling: LinearScaling | Llama3Scaling | None = None


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer with gated MLPs, RMS norms, rotary positions and grouped-query attention."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    # Rows of the embedding; the tokenizer may know fewer tokens, the surplus is padding.
    num_embedding_rows: int
    max_positions: int
    norm_eps: float
    rope: RopeConfig
    # The output head is the embedding.
    tied_embeddings: bool
    # Bias vectors on the query, key and value projections, on the output projection, on the MLP.
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    # RMS norms over each query and key head.
    qk_norm: bool = False
    # Per layer: how many positions attention sees. None: all.
    windows: tuple[int | None, ...] = ()
    # tanh cap on attention scores. None: none.
    attention_soft_cap: float | None = None
    # Multiplies the embedding's rows.
    embedding_scale: float = 1.0
    # Multiplies q·k; None: head_dim ** -0.5.
    attention_scale: float | None = None

    @property
    def scale(self) -> float:
        """The factor on q·k."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def qkv_width(self) -> int:
        """Columns of the fused query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def window(self, layer: int) -> int | None:
        """How many positions layer `layer` attends to; None is all."""
        return self.windows[layer] if self.windows else None


def parse_config(config: Mapping[str, Any]) -> ModelConfig:
    """The decoder that a config.json describes.

    Raises ModelConfigError for an unknown architecture (naming the supported ones) and for a missing or unusable field.
    """
    names = config.get("architectures") or []
    for name in names:
        if name in _FAMILIES:
            return _checked(_FAMILIES[name](_Fields(config), name))
    named = ", ".join(map(str, names)) if names else "none"
    raise ModelConfigError(
        f"config.json: architectures is {named}, which is not supported; supported: {', '.join(sorted(_FAMILIES))}"
    )


class _Fields:
    """Typed access to a config.json, with errors that name the field."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def optional(self, name: str) -> Any:
        return self._config.get(name)

    def count(self, name: str, default: int | None = None) -> int:
        value = self._config.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelConfigError(f"config.json: {name} is {value!r}, expected a whole number of at least 1")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._config.get(name)
        return _positive(name, default if value is None else value)

    def flag(self, name: str) -> bool:
        value = self._config.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise ModelConfigError(f"config.json: {name} is {value!r}, expected true or false")
        return value


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelConfigError(f"config.json: {name} is {value!r}, expected a number above 0")
    return float(value)


def _llama(fields: _Fields, architecture: str) -> ModelConfig:
    num_heads = fields.count("num_attention_heads")
    hidden_size = fields.count("hidden_size")
    head_dim = fields.count("head_dim", hidden_size // num_heads)
    activation = fields.optional("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise ModelConfigError(f"config.json: hidden_act is {activation!r}; supported: silu")
    max_positions = fields.count("max_position_embeddings", 2048)
    attention_bias = fields.flag("attention_bias")
    return ModelConfig(
        architecture=architecture,
        num_layers=fields.count("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=fields.count("num_key_value_heads", num_heads),
        head_dim=head_dim,
        num_embedding_rows=fields.count("vocab_size"),
        max_positions=max_positions,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields, head_dim, max_positions),
        tied_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias"),
    )


def _rope(fields: _Fields, head_dim: int, max_positions: int) -> RopeConfig:
    """From `rope_parameters` (transformers 5), else `rope_theta` and `rope_scaling` as earlier versions wrote them."""
    parameters: Mapping[str, Any] = fields.optional("rope_parameters") or fields.optional("rope_scaling") or {}
    theta = _positive("rope_theta", parameters.get("rope_theta") or fields.number("rope_theta", 10_000.0))
    fraction = parameters.get("partial_rotary_factor") or fields.number("partial_rotary_factor", 1.0)
    rotary_dim = int(head_dim * _positive("partial_rotary_factor", fraction))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ModelConfigError(
            f"config.json: head_dim {head_dim} and partial_rotary_factor {fraction} rotate {rotary_dim} dimensions; "
            f"expected an even number from 2 to {head_dim}"
        )
    return RopeConfig(theta, rotary_dim, _scaling(parameters, max_positions))


def _scaling(parameters: Mapping[str, Any], max_positions: int) -> LinearScaling | Llama3Scaling | None:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(_positive("rope scaling factor", parameters.get("factor")))
    if kind == "llama3":
        scaling = Llama3Scaling(
            factor=_positive("rope scaling factor", parameters.get("factor")),
            low_freq_factor=_positive("low_freq_factor", parameters.get("low_freq_factor")),
            high_freq_factor=_positive("high_freq_factor", parameters.get("high_freq_factor")),
            original_max_positions=int(
                _positive(
                    "original_max_position_embeddings",
                    parameters.get("original_max_position_embeddings") or max_positions,
                )
            ),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise ModelConfigError(
                f"config.json: high_freq_factor {scaling.high_freq_factor} must be above low_freq_factor "
                f"{scaling.low_freq_factor}"
            )
        return scaling
    raise ModelConfigError(f"config.json: rope type is {kind!r}; supported: default, linear, llama3")


def _checked(config: ModelConfig) -> ModelConfig:
    if config.num_heads % config.num_kv_heads:
        raise ModelConfigError(
            f"config.json: num_attention_heads {config.num_heads} is not a multiple of num_key_value_heads "
            f"{config.num_kv_heads}"
        )
    if config.windows and len(config.windows) != config.num_layers:
        raise ModelConfigError(
            f"config.json: attention windows for {len(config.windows)} layers, the model has {config.num_layers}"
        )
    return config


_FAMILIES: Mapping[str, Callable[[_Fields, str], ModelConfig]] = {"LlamaForCausalLM": _llama}

SUPPORTED_ARCHITECTURES: tuple[str, ...] = tuple(sorted(_FAMILIES))
"""Names that config.json's `architectures` may hold."""
