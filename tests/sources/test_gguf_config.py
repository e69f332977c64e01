"""config.json from GGUF metadata says what the file says, and refuses what it cannot say."""

import json
import math
from pathlib import Path

import gguf
import numpy as np
import pytest
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from octavo.sources import ModelSource
from octavo.sources.gguf_config import generation_config, model_config
from octavo.sources.gguf_header import GgufError, read_gguf_header
from tests.sources import tiny_gguf


def test_config_equals_transformers(tmp_path: Path) -> None:
    writer = tiny_gguf.start_llama(tmp_path / "m.gguf", 305)
    tiny_gguf.add_sentencepiece_vocabulary(writer)
    writer.add_rope_dimension_count(8)
    tiny_gguf.finish(writer)
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf")
    ours = LlamaConfig.from_dict(model_config(read_gguf_header(tmp_path / "m.gguf")))
    for name in (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "rms_norm_eps", "max_position_embeddings", "vocab_size", "tie_word_embeddings", "hidden_act",
        "rope_parameters", "bos_token_id", "eos_token_id", "attention_bias", "mlp_bias",
    ):  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, name), name


def test_smollm2_is_described(smollm2: ModelSource) -> None:
    config = json.loads((smollm2.directory / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, 49152)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    assert (config["rope_theta"], config["tie_word_embeddings"], config["rope_scaling"]) == (100000.0, True, None)


def test_untied_head_and_biases_are_seen(tmp_path: Path) -> None:
    writer = _llama(tmp_path / "m.gguf")
    writer.add_tensor("output.weight", np.zeros((8, 32), dtype=np.float32))
    writer.add_tensor("blk.0.attn_q.bias", np.zeros(32, dtype=np.float32))
    tiny_gguf.finish(writer)
    config = model_config(read_gguf_header(tmp_path / "m.gguf"))
    assert (config["tie_word_embeddings"], config["attention_bias"], config["mlp_bias"]) == (False, True, False)
    assert config["vocab_size"] == 8


def test_every_marked_end_is_an_end(tmp_path: Path) -> None:
    writer = _llama(tmp_path / "m.gguf")
    writer.add_eos_token_id(5)
    writer.add_eot_token_id(3)
    tiny_gguf.finish(writer)
    assert generation_config(read_gguf_header(tmp_path / "m.gguf")) == {"eos_token_id": [3, 5]}


def test_llama3_scaling_is_recovered_from_its_divisors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    head_dim, theta = 64, 500000.0
    reference = LlamaConfig(
        hidden_size=head_dim * 4,
        num_attention_heads=4,
        head_dim=head_dim,
        rope_parameters=scaling | {"rope_theta": theta},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](reference, "cpu")
    plain = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    writer = _llama(tmp_path / "m.gguf", rope_theta=theta, embedding_length=head_dim * 4)
    writer.add_tensor("rope_freqs.weight", (plain / scaled.numpy()).astype(np.float32))
    tiny_gguf.finish(writer)
    assert model_config(read_gguf_header(tmp_path / "m.gguf"))["rope_scaling"] == scaling


def test_other_frequency_tables_are_refused(tmp_path: Path) -> None:
    writer = _llama(tmp_path / "m.gguf")
    writer.add_tensor("rope_freqs.weight", np.array([1, 7, 2, 5], dtype=np.float32))
    tiny_gguf.finish(writer)
    with pytest.raises(GgufError, match=r"rope_freqs\.weight does not follow"):
        model_config(read_gguf_header(tmp_path / "m.gguf"))


def test_a_table_of_ones_scales_nothing(tmp_path: Path) -> None:
    writer = _llama(tmp_path / "m.gguf")
    writer.add_tensor("rope_freqs.weight", np.ones(4, dtype=np.float32))
    tiny_gguf.finish(writer)
    assert model_config(read_gguf_header(tmp_path / "m.gguf"))["rope_scaling"] is None


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (gguf.RopeScalingType.LINEAR, {"rope_type": "linear", "factor": 4.0}),
        (gguf.RopeScalingType.YARN, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}),
        (gguf.RopeScalingType.NONE, None),
    ],
)
def test_rope_scaling_is_translated(tmp_path: Path, kind: gguf.RopeScalingType, expected: object) -> None:
    writer = _llama(tmp_path / "m.gguf")
    writer.add_rope_scaling_type(kind)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)
    tiny_gguf.finish(writer)
    assert model_config(read_gguf_header(tmp_path / "m.gguf"))["rope_scaling"] == expected


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    tiny_gguf.finish(writer)
    with pytest.raises(GgufError, match="architecture 'mamba' is not supported; supported: llama"):
        model_config(read_gguf_header(tmp_path / "m.gguf"))


def test_experts_and_partial_rotation_are_refused(tmp_path: Path) -> None:
    experts = _llama(tmp_path / "experts.gguf")
    experts.add_expert_count(8)
    tiny_gguf.finish(experts)
    partial = _llama(tmp_path / "partial.gguf")
    partial.add_rope_dimension_count(4)
    tiny_gguf.finish(partial)
    with pytest.raises(GgufError, match="mixtures of experts"):
        model_config(read_gguf_header(tmp_path / "experts.gguf"))
    with pytest.raises(GgufError, match=r"rope.dimension_count is 4 and a head has 8"):
        model_config(read_gguf_header(tmp_path / "partial.gguf"))


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_head_count(4)
    writer.add_embedding_length(32)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), dtype=np.float32))
    tiny_gguf.finish(writer)
    with pytest.raises(GgufError, match=r"llama\.context_length is absent"):
        model_config(read_gguf_header(tmp_path / "m.gguf"))


def _llama(path: Path, *, rope_theta: float = 10000.0, embedding_length: int = 32) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(tiny_gguf.CONTEXT_TOKENS)
    writer.add_embedding_length(embedding_length)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(rope_theta)
    writer.add_tensor("token_embd.weight", np.zeros((8, embedding_length), dtype=np.float32))
    return writer


def test_divisors_blend_between_both_ends() -> None:
    from octavo.sources.gguf_rope import llama3_divisor

    turns_to_frequency = 2 * math.pi / 8192
    assert llama3_divisor(5 * turns_to_frequency, 8.0) == 1.0
    assert llama3_divisor(0.5 * turns_to_frequency, 8.0) == 8.0
    assert 1.0 < llama3_divisor(2 * turns_to_frequency, 8.0) < 8.0
