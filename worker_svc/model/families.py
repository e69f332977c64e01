"""From a config.json to a ModelConfig: one reading for all families, which differ by their row in the table.

Knows the field names of Hugging Face configs; the table of families is `octavo.model_families`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.model_families import (
    FAMILIES,
    FULL,
    SLIDING,
    Family,
    ModelConfigError,
    architecture_of,
    completed,
    longest_context,
)
from worker_svc.model.config import Activation, LayerView, ModelConfig
from worker_svc.model.fields import Fields
from worker_svc.model.rope_fields import read_rope

_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def parse_config(config: Mapping[str, Any]) -> ModelConfig:
    """The decoder that a config.json describes.

    Raises ModelConfigError for an unknown architecture (naming the supported ones) and for a missing or unusable field.
    """
    architecture = architecture_of(config)
    family, fields = FAMILIES[architecture], Fields(completed(config))
    _refuse_what_is_not_built(family, fields)
    num_heads = fields.count("num_attention_heads")
    hidden_size = fields.count("hidden_size")
    head_dim = fields.count("head_dim", hidden_size // num_heads)
    fields.count("max_position_embeddings")
    flags = {name: name in family.bias_flags and fields.flag(name) for name in ("attention_bias", "mlp_bias")}
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=fields.count("num_key_value_heads", num_heads),
        head_dim=head_dim,
        num_embedding_rows=fields.count("vocab_size"),
        max_positions=longest_context(fields.values),
        norm_eps=fields.number("rms_norm_eps"),
        layers=_layers(family, fields, head_dim),
        tied_embeddings=fields.flag("tie_word_embeddings"),
        activation=_activation(family, fields),
        attention_scale=fields.number("query_pre_attn_scalar", head_dim) ** -0.5,
        qkv_bias=family.qkv_bias or flags["attention_bias"],
        output_bias=flags["attention_bias"],
        mlp_bias=flags["mlp_bias"],
        qk_norm=family.qk_norm,
        post_norms=family.post_norms,
        norm_offset=family.norm_offset,
        fused_projections=family.fused_projections,
        embedding_scale=hidden_size**0.5 if family.scaled_embeddings else 1.0,
        attention_soft_cap=fields.optional_number("attn_logit_softcapping"),
        logit_soft_cap=fields.optional_number("final_logit_softcapping"),
    )


def _refuse_what_is_not_built(family: Family, fields: Fields) -> None:
    for name, neutral in family.neutral.items():
        if fields.get(name) not in neutral:
            allowed = " or ".join("null" if value is None else str(value).lower() for value in neutral)
            raise fields.fault(name, f"which is not supported; supported: absent, {allowed}")


def _activation(family: Family, fields: Fields) -> Activation:
    name = fields.get(family.activation_field)
    activation = _ACTIVATIONS.get(family.activation_aliases.get(name, name))
    if activation is None:
        raise fields.fault(family.activation_field, f"supported: {', '.join(_ACTIVATIONS)}")
    return activation


def _layers(family: Family, fields: Fields, head_dim: int) -> tuple[LayerView, ...]:
    num_layers = fields.count("num_hidden_layers")
    types = fields.get("layer_types") or _default_layer_types(family, fields, num_layers)
    if len(types) != num_layers:
        raise ModelConfigError(f"config.json: layer_types has {len(types)} entries for {num_layers} layers")
    if unknown := sorted({str(kind) for kind in types} - {FULL, SLIDING}):
        raise ModelConfigError(f"config.json: layer_types names {', '.join(unknown)}; supported: {FULL}, {SLIDING}")
    window = _window(fields)
    views = {
        FULL: LayerView(None, read_rope(family, fields, head_dim, FULL)),
        SLIDING: LayerView(window, read_rope(family, fields, head_dim, SLIDING)),
    }
    return tuple(views[kind] for kind in types)


def _window(fields: Fields) -> int | None:
    """How many positions a sliding layer sees, its own included. Qwen's `use_sliding_window` false: all of them."""
    return None if fields.get("use_sliding_window") is False else fields.optional_count("sliding_window")


def _default_layer_types(family: Family, fields: Fields, num_layers: int) -> list[str]:
    """The types of layers where the config has no list of them."""
    if family.window_period is None or _window(fields) is None:
        return [FULL] * num_layers
    period = family.window_period
    if period and fields.get("sliding_window_pattern") is not None:
        period = fields.count("sliding_window_pattern")
    first = 0
    if fields.get("use_sliding_window") is not None:
        # Zero is a meaning of this field: every layer.
        first = 0 if fields.get("max_window_layers") == 0 else fields.count("max_window_layers")
    slides = [layer >= first and (period == 0 or layer % period < period - 1) for layer in range(num_layers)]
    return [SLIDING if slide else FULL for slide in slides]
