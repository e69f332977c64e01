"""The rotary embedding that a config.json describes, whichever release of transformers wrote it.

Knows field names and the defaults of each scaling; the arithmetic is rope.py's.
"""

from __future__ import annotations

import math

from octavo.model_families import FULL, SLIDING, Family, ModelConfigError, rope_parameters
from worker_svc.model.config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)
from worker_svc.model.fields import Fields

_SUPPORTED = "default, linear, dynamic, yarn, llama3, longrope"


def read_rope(family: Family, fields: Fields, head_dim: int, layer_type: str) -> RopeConfig:
    """The rotary embedding of layers of a type; raises ModelConfigError naming a field that is unusable."""
    stated = rope_parameters(fields.values, layer_type)
    is_nested = stated != rope_parameters(fields.values, "")
    if family.local_rope and layer_type == SLIDING and not is_nested:
        return RopeConfig(fields.number("rope_local_base_freq"), _even(head_dim, 1.0, head_dim))
    parameters = Fields(stated, "config.json: rope parameters")
    default_theta = "rope_local_base_freq" if family.local_rope and layer_type != FULL else "rope_theta"
    theta = parameters.number("rope_theta", fields.number(default_theta))
    fraction = parameters.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    rotary_dim = _even(int(head_dim * fraction), fraction, head_dim)
    return RopeConfig(theta, rotary_dim, _scaling(family, parameters, fields, rotary_dim))


def _even(rotary_dim: int, fraction: float, head_dim: int) -> int:
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ModelConfigError(
            f"config.json: head_dim {head_dim} and partial_rotary_factor {fraction} rotate {rotary_dim} dimensions; "
            f"expected an even number from 2 to {head_dim}"
        )
    return rotary_dim


def _scaling(family: Family, parameters: Fields, fields: Fields, rotary_dim: int) -> RopeScaling | None:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = family.rope_aliases.get(kind, kind)
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(parameters.number("factor"))
    if kind == "dynamic":
        return DynamicScaling(parameters.number("factor"), fields.count("max_position_embeddings"))
    if kind == "llama3":
        return _llama3(parameters, fields)
    if kind == "yarn":
        return _yarn(parameters, fields)
    if kind == "longrope":
        return _long_rope(parameters, fields, rotary_dim)
    raise ModelConfigError(f"config.json: rope type is {kind!r}; supported: {_SUPPORTED}")


def _original_positions(parameters: Fields, fields: Fields) -> int:
    """Phi-3 states it beside the rotary parameters, and that one counts; others within, or nowhere."""
    beside = fields.optional_count("original_max_position_embeddings")
    default = fields.count("max_position_embeddings")
    return beside or parameters.count("original_max_position_embeddings", default)


def _llama3(parameters: Fields, fields: Fields) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=parameters.number("factor"),
        low_freq_factor=parameters.number("low_freq_factor"),
        high_freq_factor=parameters.number("high_freq_factor"),
        original_max_positions=_original_positions(parameters, fields),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ModelConfigError(
            f"config.json: high_freq_factor {scaling.high_freq_factor} must be above low_freq_factor "
            f"{scaling.low_freq_factor}"
        )
    return scaling


def _yarn(parameters: Fields, fields: Fields) -> YarnScaling:
    """YaRN: B. Peng et al., https://arxiv.org/abs/2309.00071; `mscale` and `mscale_all_dim` as DeepSeek added them."""
    factor = parameters.number("factor")
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    attention_factor = parameters.optional_number("attention_factor")
    if attention_factor is None:
        attention_factor = _temperature(factor, 1.0)
        if mscale and mscale_all_dim:
            attention_factor = _temperature(factor, parameters.number("mscale"))
            attention_factor /= _temperature(factor, parameters.number("mscale_all_dim"))
    return YarnScaling(
        factor=factor,
        original_max_positions=_original_positions(parameters, fields),
        beta_fast=parameters.number("beta_fast", 32.0),
        beta_slow=parameters.number("beta_slow", 1.0),
        truncate=parameters.flag("truncate", default=True),
        attention_factor=attention_factor,
    )


def _temperature(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _long_rope(parameters: Fields, fields: Fields, rotary_dim: int) -> LongRopeScaling:
    """LongRoPE: Y. Ding et al., https://arxiv.org/abs/2402.13753."""
    original = _original_positions(parameters, fields)
    factor = parameters.number("factor", fields.count("max_position_embeddings") / original)
    attention_factor = parameters.optional_number("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRopeScaling(
        short_factors=parameters.numbers("short_factor", rotary_dim // 2),
        long_factors=parameters.numbers("long_factor", rotary_dim // 2),
        original_max_positions=original,
        attention_factor=attention_factor,
    )
