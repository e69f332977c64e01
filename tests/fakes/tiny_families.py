"""A small random checkpoint of each supported family, made by transformers' own classes.

Weights are scaled so that logits differ clearly and every part of a layer matters. Windows are of WINDOW positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.fakes.checkpoint_files import ModelFiles, write_model
from tests.fakes.tiny_llama import TINY_VOCAB_SIZE
from tests.fakes.tiny_tokenizers import END_TOKEN, tiny_tokenizer

WINDOW = 8
PADDING_ROWS = 7
ORIGINAL_POSITIONS = 32
_SHAPE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": TINY_VOCAB_SIZE + PADDING_ROWS,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
_YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL_POSITIONS}
_LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.25, 1.5, 1.75, 2.0, 2.25],
    "long_factor": [1.5, 2.0, 3.0, 5.0, 8.0, 13.0],
}
_GEMMA3_ROPE: dict[str, Any] = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}


@dataclass(frozen=True)
class TinyFamily:
    """A family's config in transformers' terms, and what its config.json says instead of what transformers 5 writes."""

    config: PreTrainedConfig
    rewritten: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


FAMILIES: Mapping[str, TinyFamily] = {
    "llama_yarn": TinyFamily(LlamaConfig(**_SHAPE, rope_parameters=_YARN | {"rope_theta": 10_000.0})),
    "llama_yarn_mscale": TinyFamily(
        LlamaConfig(
            **_SHAPE,
            rope_parameters=_YARN | {"mscale": 1.2, "mscale_all_dim": 0.7, "beta_fast": 8.0, "truncate": False},
        )
    ),
    "llama_dynamic": TinyFamily(
        LlamaConfig(
            **_SHAPE | {"max_position_embeddings": ORIGINAL_POSITIONS},
            rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
        )
    ),
    "mistral": TinyFamily(MistralConfig(**_SHAPE, sliding_window=WINDOW, head_dim=32)),
    "mistral_without_window": TinyFamily(MistralConfig(**_SHAPE, sliding_window=None)),
    "qwen2": TinyFamily(
        Qwen2Config(
            **_SHAPE | {"num_hidden_layers": 3},
            use_sliding_window=True,
            sliding_window=WINDOW,
            max_window_layers=1,
            tie_word_embeddings=True,
        )
    ),
    "qwen2_window_off": TinyFamily(
        Qwen2Config(**_SHAPE, use_sliding_window=False, sliding_window=WINDOW, max_window_layers=0),
        {"sliding_window": WINDOW, "layer_types": None},
    ),
    "qwen3": TinyFamily(
        Qwen3Config(**_SHAPE, head_dim=32, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=0)
    ),
    "gemma": TinyFamily(GemmaConfig(**_SHAPE, head_dim=32), {"hidden_act": "gelu"}),
    "gemma2": TinyFamily(
        Gemma2Config(
            **_SHAPE | {"num_hidden_layers": 3},
            head_dim=32,
            query_pre_attn_scalar=24,
            sliding_window=WINDOW,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=8.0,
        ),
        # As released: no list of layer types.
        {"layer_types": None},
    ),
    "gemma3": TinyFamily(
        Gemma3TextConfig(
            **_SHAPE | {"num_hidden_layers": 3},
            head_dim=32,
            query_pre_attn_scalar=24,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters=_GEMMA3_ROPE,
        )
    ),
    "gemma3_as_released": TinyFamily(
        Gemma3TextConfig(
            **_SHAPE | {"num_hidden_layers": 7},
            head_dim=32,
            query_pre_attn_scalar=24,
            sliding_window=WINDOW,
            rope_parameters=_GEMMA3_ROPE,
        ),
        {
            "layer_types": None,
            "rope_parameters": None,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10_000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 6,
        },
    ),
    "phi3": TinyFamily(Phi3Config(**_SHAPE, sliding_window=WINDOW)),
    "phi3_longrope": TinyFamily(
        Phi3Config(
            **_SHAPE,
            tie_word_embeddings=True,
            original_max_position_embeddings=ORIGINAL_POSITIONS,
            rope_parameters=_LONG_ROPE,
        )
    ),
}


def tiny_model(family: TinyFamily) -> PreTrainedModel:
    """The family's model in fp32 with random weights; eager attention, which alone knows soft caps."""
    load: Any = AutoModelForCausalLM.from_config  # transformers leaves it untyped
    model: PreTrainedModel = load(family.config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(family.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_scaled(name, values, family.config.model_type))
    return model


def _scaled(name: str, values: torch.Tensor, model_type: str) -> torch.Tensor:
    if name.endswith("bias"):
        return 0.2 * values
    if name.endswith("norm.weight"):
        return 0.1 * values + (0.0 if model_type.startswith("gemma") else 1.0)
    if "embed_tokens" in name or "lm_head" in name:
        # Gemma multiplies it by eight: more would drown the layers, and every token would be followed by itself.
        return (0.1 if model_type.startswith("gemma") else 0.3) * values
    return values / math.sqrt(values.shape[1])


def pin_rope_length(model: Any, num_positions: int) -> None:
    """Makes the model turn every sequence as one of `num_positions` tokens; by itself it goes by each sequence."""
    rotary = model.model.rotary_emb
    frequencies, _ = ROPE_INIT_FUNCTIONS[rotary.rope_type](model.config, torch.device("cpu"), seq_len=num_positions)
    for buffer in (rotary.inv_freq, rotary.original_inv_freq):
        buffer.copy_(frequencies)
    # LongRoPE's choice between the two, and dynamic scaling's growth, are both frozen then.
    rotary.long_inv_freq, rotary.max_seq_len_cached, rotary.original_max_seq_len = frequencies, num_positions, 0


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What a checkpoint of the model holds: a tied head is not in it."""
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors


def config_json(family: TinyFamily) -> dict[str, Any]:
    """The checkpoint's config.json. Fields that are rewritten to None are left out."""
    config = family.config.to_dict() | {"architectures": [_ARCHITECTURES[family.config.model_type]]}
    config |= family.rewritten
    return {name: value for name, value in config.items() if value is not None or name not in family.rewritten}


def write_tiny_family(directory: Path, family: TinyFamily, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Writes a checkpoint of `tensors`; returns the directory."""
    files = ModelFiles(config_json(family), tensors, tiny_tokenizer([]), {"eos_token": END_TOKEN})
    return write_model(directory, files)


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
