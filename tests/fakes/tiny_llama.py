"""Random Llama checkpoints small enough to run in milliseconds, with a byte-level tokenizer.

Weights come from one seed, scaled so that logits differ clearly and every part of the layer matters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.fakes.checkpoint_files import ModelFiles, write_model
from tests.fakes.tiny_tokenizers import END_TOKEN, tiny_tokenizer


@dataclass(frozen=True)
class TinyLlama:
    """The shape of a random checkpoint. The vocabulary is the tokenizer's 257 tokens and `padding_rows` more."""

    num_layers: int = 2
    hidden_size: int = 64
    intermediate_size: int = 96
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    padding_rows: int = 7
    max_positions: int = 512
    tied_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0


TINY_VOCAB_SIZE = 257
"""Tokens of the tiny checkpoints' tokenizer."""


def write_tiny_llama(directory: Path, shape: TinyLlama) -> Path:
    """Writes the checkpoint; returns the directory."""
    tokenizer = tiny_tokenizer([])
    files = ModelFiles(
        config=tiny_config(shape),
        tensors=random_tensors(shape),
        tokenizer=tokenizer,
        tokenizer_config={"eos_token": END_TOKEN},
    )
    return write_model(directory, files)


def tiny_config(shape: TinyLlama) -> dict[str, Any]:
    """Its config.json."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": TINY_VOCAB_SIZE + shape.padding_rows,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": shape.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tied_embeddings,
        "attention_bias": shape.attention_bias,
        "mlp_bias": shape.mlp_bias,
        "bos_token_id": None,
        "eos_token_id": 0,
        "torch_dtype": str(shape.dtype).removeprefix("torch."),
    }
    if shape.rope_scaling is not None:
        config["rope_scaling"] = dict(shape.rope_scaling)
    return config


def random_tensors(shape: TinyLlama) -> dict[str, torch.Tensor]:
    """Its weights under Hugging Face's names."""
    generator = torch.Generator().manual_seed(shape.seed)

    def random(*size: int, scale: float) -> torch.Tensor:
        return (torch.randn(size, generator=generator) * scale).to(shape.dtype)

    hidden, width = shape.hidden_size, shape.intermediate_size
    q_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    rows = TINY_VOCAB_SIZE + shape.padding_rows
    tensors = {
        "model.embed_tokens.weight": random(rows, hidden, scale=1.0),
        "model.norm.weight": 1 + random(hidden, scale=0.1),
    }
    if not shape.tied_embeddings:
        tensors["lm_head.weight"] = random(rows, hidden, scale=0.3)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"] = 1 + random(hidden, scale=0.1)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = 1 + random(hidden, scale=0.1)
        projections = {
            "self_attn.q_proj": (q_width, hidden, shape.attention_bias),
            "self_attn.k_proj": (kv_width, hidden, shape.attention_bias),
            "self_attn.v_proj": (kv_width, hidden, shape.attention_bias),
            "self_attn.o_proj": (hidden, q_width, shape.attention_bias),
            "mlp.gate_proj": (width, hidden, shape.mlp_bias),
            "mlp.up_proj": (width, hidden, shape.mlp_bias),
            "mlp.down_proj": (hidden, width, shape.mlp_bias),
        }
        for name, (num_rows, num_columns, has_bias) in projections.items():
            tensors[f"{prefix}.{name}.weight"] = random(num_rows, num_columns, scale=num_columns**-0.5)
            if has_bias:
                tensors[f"{prefix}.{name}.bias"] = random(num_rows, scale=0.2)
    return tensors
