"""The model families that can be served, as data: how each differs, and what it means where a config.json is silent.

The one table of families. The worker builds its decoder from it, and memory is predicted from it before anything is
loaded. Knows the field names and defaults of Hugging Face configs; knows no tensors and no arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SLIDING, FULL = "sliding_attention", "full_attention"


class ModelConfigError(ValueError):
    """A config.json that cannot be served; the message names the field, its value and what is supported."""


@dataclass(frozen=True)
class Family:
    """How a family differs from Llama, which is all defaults here."""

    # Values of fields that a config.json may leave out. A field that is there and null keeps its null.
    defaults: Mapping[str, object] = field(default_factory=dict)
    # Fields that would change the arithmetic in a way that is not built, with the values at which they do not.
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    # Query, key and value projections always have a bias, whatever the config says.
    qkv_bias: bool = False
    # Which of `attention_bias` (query, key, value, output) and `mlp_bias` the config may set.
    bias_flags: frozenset[str] = frozenset()
    # RMS norms over each query and key head.
    qk_norm: bool = False
    # Norms after attention and after the MLP too, each before its sum with the residual.
    post_norms: bool = False
    # Norms multiply by this plus their weight; embeddings are scaled by sqrt(hidden_size).
    norm_offset: float = 0.0
    scaled_embeddings: bool = False
    # Checkpoints hold one matrix for query, key, value and one for gate, up.
    fused_projections: bool = False
    # Which field names the activation, and older names of it.
    activation_field: str = "hidden_act"
    activation_aliases: Mapping[str, str] = field(default_factory=dict)
    # Where `layer_types` is absent: layer i sees a window unless i % period is period - 1. 0: every layer,
    # or, with `use_sliding_window`, those from `max_window_layers` on. None: no layer ever.
    window_period: int | None = None
    # Layers with a window have a rotary base of their own, `rope_local_base_freq`, and are never scaled.
    local_rope: bool = False
    # Names of the rotary scaling that mean another one here.
    rope_aliases: Mapping[str, str] = field(default_factory=dict)


_COMMON: Mapping[str, object] = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False}
_LLAMA = {**_COMMON, "max_position_embeddings": 2048, "hidden_act": "silu"}
_QWEN = {
    **_COMMON,
    "max_position_embeddings": 32_768,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA = {
    **_COMMON,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
}
_GEMMA2 = {**_GEMMA, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096}
_GEMMA2_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA3 = {
    **_GEMMA2,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "sliding_window_pattern": 6,
}
_PHI3 = {
    **_COMMON,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "sliding_window": None,
}
_CAUSAL: Mapping[str, tuple[object, ...]] = {"use_bidirectional_attention": (None, False)}
_ATTENTION_BIAS = frozenset({"attention_bias"})

FAMILIES: Mapping[str, Family] = {
    "GemmaForCausalLM": Family(
        defaults=_GEMMA,
        neutral=_CAUSAL,
        bias_flags=_ATTENTION_BIAS,
        norm_offset=1.0,
        scaled_embeddings=True,
        activation_aliases={"gelu": "gelu_pytorch_tanh"},
    ),
    "Gemma2ForCausalLM": Family(
        defaults={**_GEMMA2, **_GEMMA2_CAPS},
        neutral=_CAUSAL,
        bias_flags=_ATTENTION_BIAS,
        post_norms=True,
        norm_offset=1.0,
        scaled_embeddings=True,
        activation_field="hidden_activation",
        window_period=2,
    ),
    "Gemma3ForCausalLM": Family(
        defaults=_GEMMA3,
        neutral={**_CAUSAL, "attn_logit_softcapping": (None,)},
        bias_flags=_ATTENTION_BIAS,
        qk_norm=True,
        post_norms=True,
        norm_offset=1.0,
        scaled_embeddings=True,
        activation_field="hidden_activation",
        window_period=6,
        local_rope=True,
    ),
    "LlamaForCausalLM": Family(defaults=_LLAMA, bias_flags=frozenset({"attention_bias", "mlp_bias"})),
    "MistralForCausalLM": Family(
        defaults={**_LLAMA, "max_position_embeddings": 131_072, "sliding_window": 4096}, window_period=0
    ),
    "Phi3ForCausalLM": Family(
        defaults=_PHI3, fused_projections=True, window_period=0, rope_aliases={"su": "longrope", "yarn": "longrope"}
    ),
    "Qwen2ForCausalLM": Family(defaults=_QWEN, qkv_bias=True, window_period=0),
    "Qwen3ForCausalLM": Family(
        defaults={**_QWEN, "head_dim": 128}, bias_flags=_ATTENTION_BIAS, qk_norm=True, window_period=0
    ),
}
"""By the name in config.json's `architectures`. The defaults are those of transformers' config classes."""

SUPPORTED_ARCHITECTURES: tuple[str, ...] = tuple(sorted(FAMILIES))


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first supported name in `architectures`; raises ModelConfigError with the list of those that are."""
    names = config.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return str(name)
    named = ", ".join(map(str, names)) if names else "none"
    raise ModelConfigError(
        f"config.json: architectures is {named}, which is not supported; supported: "
        f"{', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with its family's defaults for absent fields; raises ModelConfigError as `architecture_of` does."""
    return {**FAMILIES[architecture_of(config)].defaults, **config}


def rope_parameters(config: Mapping[str, Any], layer_type: str = FULL) -> Mapping[str, Any]:
    """The rotary scaling of layers of a type, from the fields that releases of transformers have used; may be empty.

    `rope_parameters` (transformers 5) may be one mapping or one for each layer type; before it was `rope_scaling`.
    """
    parameters: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    nested = parameters.get(layer_type)
    return nested if isinstance(nested, Mapping) else parameters


def longest_context(config: Mapping[str, Any]) -> int:
    """Positions that a completed config's model was made for.

    `max_position_embeddings`; but where the rotary scaling is dynamic or YaRN that may be the length before
    scaling, and `factor` times the original length counts where it is more.
    """
    positions = int(config["max_position_embeddings"])
    rope = rope_parameters(config)
    kind = rope.get("rope_type") or rope.get("type")
    kind = FAMILIES[architecture_of(config)].rope_aliases.get(str(kind), kind)
    factor = rope.get("factor")
    if kind not in ("dynamic", "yarn") or isinstance(factor, bool) or not isinstance(factor, int | float):
        return positions
    original = rope.get("original_max_position_embeddings") if kind == "yarn" else None
    return max(positions, int((original or positions) * factor))
