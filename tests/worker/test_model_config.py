"""config.json to ModelConfig, and the rotary table, against transformers' own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.fakes.tiny_llama import TinyLlama, random_tensors, tiny_config
from worker_svc.model.config import LinearScaling, Llama3Scaling, ModelConfigError, parse_config
from worker_svc.model.names import expected_shapes
from worker_svc.model.rope import rope_table

LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}


def test_defaults_are_those_of_llama() -> None:
    fields = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64}
    config = parse_config({**fields, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 100})
    oracle = LlamaConfig()
    assert (config.num_kv_heads, config.head_dim, config.scale) == (4, 16, 0.25)
    assert (config.norm_eps, config.max_positions) == (oracle.rms_norm_eps, oracle.max_position_embeddings)
    assert (config.rope.theta, config.rope.scaling, config.tied_embeddings) == (10_000.0, None, False)
    assert config.window(1) is None


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, LinearScaling(4.0)),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, Llama3Scaling(32.0, 1.0, 4.0, 128)),
        ({"rope_scaling": None}, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, None),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}, Llama3Scaling(32.0, 1.0, 4.0, 128)),
    ],
)
def test_the_rotary_table_is_that_of_transformers(fields: dict[str, Any], scaling: object) -> None:
    raw = {**tiny_config(TinyLlama()), **fields}
    config = parse_config(raw)
    assert config.rope.scaling == scaling
    oracle = LlamaRotaryEmbedding(LlamaConfig(**{k: v for k, v in raw.items() if k != "torch_dtype"}))
    cos, sin = oracle(torch.zeros(1), torch.arange(512)[None])
    table = rope_table(config.rope, 512)
    half = config.head_dim // 2
    np.testing.assert_allclose(table.cos, cos[0, :, :half], atol=5e-5)
    np.testing.assert_allclose(table.sin, sin[0, :, :half], atol=5e-5)


@pytest.mark.parametrize("shape", [TinyLlama(), TinyLlama(tied_embeddings=True), TinyLlama(attention_bias=True)])
def test_expected_shapes_are_those_of_a_checkpoint(shape: TinyLlama) -> None:
    found = {name: tuple(tensor.shape) for name, tensor in random_tensors(shape).items()}
    assert expected_shapes(parse_config(tiny_config(shape))) == found


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "MambaForCausalLM, which is not supported; supported: LlamaForCausalLM",
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
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "rope type is 'yarn'; supported: default, linear, llama3",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope scaling factor is None"),
    ],
)
def test_what_cannot_be_served_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        parse_config({**tiny_config(TinyLlama()), **fields})
    assert message in str(caught.value)
