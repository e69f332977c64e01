"""One tiny model of each family, made by transformers and written as GGUF the way llama.cpp's converter does.

What is written here is its own account of those conventions: names from the gguf package's map, permuted
rows one by one, metadata fields as the converter of each family sets them.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tests.sources import tiny_gguf
from tests.weights.tiny_checkpoints import interleave

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
CONTEXT_TOKENS = 64
NUM_SENTENCEPIECE_TOKENS = 305
_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_TOKENS,
    "vocab_size": NUM_SENTENCEPIECE_TOKENS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
# Its vocabulary has 260 tokens, so that the embedding is padded.
_QWEN_SHAPE = _SHAPE | {"bos_token_id": None, "eos_token_id": 258}
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0, "original_max_position_embeddings": 32}
_LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.25, 1.5, 1.75, 2.0, 2.25],
    "long_factor": [1.5, 2.0, 3.0, 5.0, 8.0, 13.0],
}
_GEMMA3_ROPE: dict[str, Any] = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


@dataclass(frozen=True)
class Family:
    """`gguf_name` is the architecture's name in a file; `fields` writes what its converter adds to the common."""

    gguf_name: str
    config: PreTrainedConfig
    fields: Callable[[gguf.GGUFWriter, PreTrainedConfig], None]
    norm_offset: float = 0.0


def make_model(family: Family, seed: int = 0) -> PreTrainedModel:
    """A float32 model of weights that are multiples of 2**-10 below 1/2: float16 holds them, 1 + w is exact."""
    model = bare_model(family.config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-511, 512, parameter.shape, generator=generator) / 1024)
    return model


def bare_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The family's model in float32, with whatever weights transformers begins with."""
    load: Any = AutoModelForCausalLM.from_config  # transformers leaves it untyped
    model: PreTrainedModel = load(config, dtype=torch.float32, attn_implementation="eager").eval()
    return model


def checkpoint_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors that a safetensors checkpoint of the model holds: a tied head is not among them."""
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return weights


def write_gguf(
    path: Path, family: Family, weights: Mapping[str, torch.Tensor], matrix_type: gguf.GGMLQuantizationType
) -> None:
    """Matrices in `matrix_type`, vectors in float32, as llama.cpp does."""
    config = family.config
    writer = gguf.GGUFWriter(path, family.gguf_name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    family.fields(writer, config)
    if family.gguf_name.startswith("qwen"):
        tiny_gguf.add_byte_level_vocabulary(writer, "qwen2")
    else:
        tiny_gguf.add_sentencepiece_vocabulary(writer)
    writer.add_chat_template(TEMPLATE)
    architecture = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[family.gguf_name]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in weights.items():
        stem, _, kind = name.rpartition(".")
        stored = _stored(family, stem, tensor.numpy())
        tensor_type = matrix_type if stored.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{names.get_name(stem)}.{kind}", gguf.quantize(stored, tensor_type), raw_dtype=tensor_type)
    tiny_gguf.finish(writer)


def _stored(family: Family, stem: str, values: np.ndarray) -> np.ndarray:
    if family.gguf_name == "llama" and stem.endswith(("q_proj", "k_proj")):
        config = family.config
        return interleave(values, config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads)
    return values + np.float32(family.norm_offset) if stem.endswith("norm") else values


def _llama(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    frequencies = config.rope_parameters["rope_theta"] ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    divisors = []
    for wavelength in 2 * math.pi / frequencies:
        turns = 8192 / wavelength
        smooth = min(max((turns - 1) / 3, 0), 1)
        divisors.append(1 / ((1 - smooth) / 8 + smooth))
    writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))


def _qwen2(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])


def _qwen3(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _head_length(writer, config)


def _head_length(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)


def _gemma2(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    _head_length(writer, config)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)


def _gemma3(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    _head_length(writer, config)
    everywhere = config.rope_parameters["full_attention"]
    writer.add_rope_freq_base(everywhere["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(everywhere["factor"])
    writer.add_sliding_window(config.sliding_window)


def _phi3(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    rope, original = config.rope_parameters, config.original_max_position_embeddings
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(rope["partial_rotary_factor"] * config.hidden_size) // 4)
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_sliding_window(config.sliding_window or 0)
    if rope["rope_type"] == "longrope":
        scale = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
        for length in ("long", "short"):
            factors = np.array(rope[f"{length}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)


# A head size that is not the width over the heads, where the family has the field.
FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", LlamaConfig(**_SHAPE, head_dim=16, attention_bias=True, rope_parameters=_LLAMA3), _llama),
    "qwen2": Family("qwen2", Qwen2Config(**_QWEN_SHAPE, tie_word_embeddings=True, rope_parameters=_YARN), _qwen2),
    "qwen3": Family("qwen3", Qwen3Config(**_QWEN_SHAPE, head_dim=32), _qwen3),
    "gemma": Family("gemma", GemmaConfig(**_SHAPE, head_dim=32), _head_length, 1.0),
    "gemma2": Family(
        "gemma2", Gemma2Config(**_SHAPE, head_dim=32, query_pre_attn_scalar=32, sliding_window=8), _gemma2, 1.0
    ),
    "gemma3": Family(
        "gemma3",
        Gemma3TextConfig(
            **_SHAPE | {"num_hidden_layers": 7},
            head_dim=32,
            query_pre_attn_scalar=32,
            sliding_window=8,
            rope_parameters=_GEMMA3_ROPE,
        ),
        _gemma3,
        1.0,
    ),
    "phi3": Family("phi3", Phi3Config(**_SHAPE, sliding_window=10), _phi3),
    "phi3-longrope": Family(
        "phi3", Phi3Config(**_SHAPE, original_max_position_embeddings=16, rope_parameters=_LONG_ROPE), _phi3
    ),
}
