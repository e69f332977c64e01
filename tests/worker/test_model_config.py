"""config.json to ModelConfig, and the rotary table, against transformers' own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from octavo.memory import ModelShape
from octavo.model_families import SUPPORTED_ARCHITECTURES, ModelConfigError
from tests.fakes.tiny_families import FAMILIES, checkpoint_tensors, config_json, tiny_model
from tests.fakes.tiny_llama import TinyLlama, random_tensors, tiny_config
from worker_svc.kv_cache import model_shape
from worker_svc.model.config import LinearScaling, RopeConfig
from worker_svc.model.families import parse_config
from worker_svc.model.names import expected_shapes
from worker_svc.model.rope import rope_table

LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}


NEEDED = {"num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 9}
CONFIGS: dict[str, type[Any]] = {
    "LlamaForCausalLM": LlamaConfig,
    "MistralForCausalLM": MistralConfig,
    "Qwen2ForCausalLM": Qwen2Config,
    "Qwen3ForCausalLM": Qwen3Config,
    "GemmaForCausalLM": GemmaConfig,
    "Gemma2ForCausalLM": Gemma2Config,
    "Gemma3ForCausalLM": Gemma3TextConfig,
    "Phi3ForCausalLM": Phi3Config,
}


def test_every_family_is_here() -> None:
    assert tuple(sorted(CONFIGS)) == SUPPORTED_ARCHITECTURES


@pytest.mark.parametrize("architecture", CONFIGS)
def test_defaults_are_those_of_transformers(architecture: str) -> None:
    """A config.json may leave out what is the class's default: read bare, and as transformers fills it in."""
    bare = {"architectures": [architecture], **NEEDED, "num_key_value_heads": 4}
    full = CONFIGS[architecture](**NEEDED, num_key_value_heads=4).to_dict()
    assert parse_config(bare) == parse_config({**full, "architectures": [architecture]})


@pytest.mark.parametrize("name", FAMILIES)
def test_memory_is_predicted_for_the_tensors_there_are(name: str) -> None:
    config = config_json(FAMILIES[name])
    parsed = parse_config(config)
    shape = ModelShape.from_config(config)
    assert shape == model_shape(parsed, parsed.max_positions)
    assert shape.num_parameters == sum(math.prod(size) for size in expected_shapes(parsed).values())


def rotary_cases() -> dict[str, tuple[dict[str, Any], int]]:
    """Fields of a Llama's config, and the length that the worker serves."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    dynamic = {"max_position_embeddings": 128, "rope_scaling": {"type": "dynamic", "factor": 4.0}}
    factors = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [1.0 + i for i in range(8)]}
    long_rope = {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 128, **factors}}
    return {
        "none": ({"rope_scaling": None}, 512),
        "theta": ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 512),
        "linear": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 512),
        "llama3": ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 512),
        "llama3 in parameters": ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}, 512),
        "yarn": ({"rope_scaling": yarn}, 512),
        "yarn with mscale": ({"rope_scaling": {**yarn, "mscale": 1.3, "mscale_all_dim": 0.5}}, 512),
        "yarn with a stated factor": ({"rope_scaling": {**yarn, "attention_factor": 1.5, "beta_slow": 2.0}}, 512),
        "yarn between whole pairs": ({"rope_scaling": {**yarn, "beta_fast": 6.0, "truncate": False}}, 512),
        "dynamic within": (dynamic, 128),
        "dynamic beyond": (dynamic, 400),
        "longrope within": (long_rope, 128),
        "longrope beyond": (long_rope, 512),
    }


@pytest.mark.parametrize(("fields", "num_positions"), rotary_cases().values(), ids=rotary_cases())
def test_the_rotary_table_is_that_of_transformers(fields: dict[str, Any], num_positions: int) -> None:
    raw = {**tiny_config(TinyLlama()), **fields}
    config = parse_config(raw)
    oracle = LlamaRotaryEmbedding(LlamaConfig(**{k: v for k, v in raw.items() if k != "torch_dtype"}))
    cos, sin = oracle(torch.zeros(1), torch.arange(num_positions)[None])
    (rope,) = config.ropes
    table = rope_table(rope, num_positions)
    half = config.head_dim // 2
    np.testing.assert_allclose(table.cos, cos[0, :, :half], atol=1e-4)
    np.testing.assert_allclose(table.sin, sin[0, :, :half], atol=1e-4)


def test_a_long_table_is_one_however_it_is_cut() -> None:
    rope = RopeConfig(10_000.0, 16)
    table, short = rope_table(rope, 10_000), rope_table(rope, 5000)
    assert torch.equal(table.cos[:5000], short.cos)
    assert float(table.sin[9999, 0]) == pytest.approx(math.sin(9999), abs=1e-6)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 512),
        ({"type": "linear", "factor": 4.0}, 512),
        ({"type": "dynamic", "factor": 2.0}, 1024),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
    ],
)
def test_the_longest_context_counts_what_scaling_adds(scaling: dict[str, Any] | None, longest: int) -> None:
    assert parse_config({**tiny_config(TinyLlama()), "rope_scaling": scaling}).max_positions == longest


def windows(fields: Mapping[str, Any]) -> list[int | None]:
    return [layer.window for layer in parse_config({**NEEDED, **fields}).layers]


def test_which_layers_see_a_window() -> None:
    qwen2 = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 16, "max_window_layers": 6}
    assert windows(qwen2) == [None] * 8
    assert windows({**qwen2, "use_sliding_window": True}) == [None] * 6 + [16] * 2
    assert windows({**qwen2, "use_sliding_window": True, "max_window_layers": 0}) == [16] * 8
    listed = ["full_attention", "sliding_attention"] * 4
    assert windows({**qwen2, "use_sliding_window": True, "layer_types": listed}) == [None, 16] * 4
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert windows(mistral) == [4096] * 8
    assert windows({**mistral, "sliding_window": None}) == [None] * 8
    assert windows({"architectures": ["Gemma2ForCausalLM"], "sliding_window": 16}) == [16, None] * 4
    gemma3 = {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 16}
    assert windows(gemma3) == [16] * 5 + [None] + [16] * 2
    assert windows({**gemma3, "sliding_window_pattern": 2}) == [16, None] * 4


def test_gemma3_turns_windowed_layers_by_their_own_base() -> None:
    config = parse_config(config_json(FAMILIES["gemma3_as_released"]))
    ropes = {layer.window: layer.rope for layer in config.layers}
    assert ropes[8] == RopeConfig(10_000.0, 32)
    assert ropes[None] == RopeConfig(1e6, 32, LinearScaling(8.0))


@pytest.mark.parametrize("name", FAMILIES)
def test_expected_tensors_are_those_of_transformers(name: str) -> None:
    found = {key: tuple(tensor.shape) for key, tensor in checkpoint_tensors(tiny_model(FAMILIES[name])).items()}
    assert expected_shapes(parse_config(config_json(FAMILIES[name]))) == found


@pytest.mark.parametrize("shape", [TinyLlama(), TinyLlama(tied_embeddings=True), TinyLlama(attention_bias=True)])
def test_expected_shapes_are_those_of_a_checkpoint(shape: TinyLlama) -> None:
    found = {name: tuple(tensor.shape) for name, tensor in random_tensors(shape).items()}
    assert expected_shapes(parse_config(tiny_config(shape))) == found


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "MambaForCausalLM, which is not supported; supported: Gemma2ForCausalLM, Gemma3ForCausalLM, "
            "GemmaForCausalLM, LlamaForCausalLM, MistralForCausalLM, Phi3ForCausalLM, Qwen2ForCausalLM, "
            "Qwen3ForCausalLM",
        ),
        ({"architectures": None}, "architectures is none"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"hidden_size": "big"}, "hidden_size is 'big'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'"),
        ({"head_dim": 15}, "head_dim 15"),
        (
            {"rope_scaling": {"rope_type": "mrope", "factor": 2.0}},
            "rope type is 'mrope'; supported: default, linear, dynamic, yarn, llama3, longrope",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope parameters: factor is None"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types names chunked_attention"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 7}},
            "long_factor has 7 entries, expected 8",
        ),
        (
            {"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True},
            "use_bidirectional_attention is True, which is not supported; supported: absent, null or false",
        ),
    ],
)
def test_what_cannot_be_served_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        parse_config({**tiny_config(TinyLlama()), **fields})
    assert message in str(caught.value)
