"""config.json from GGUF metadata says what the file says, and refuses what it cannot say."""

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from octavo.sources import ModelSource
from octavo.sources.gguf_config import generation_config, model_config
from octavo.sources.gguf_header import GgufError, GgufHeader, GgufTensor, read_gguf_header
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


def test_f54_llama3_scaling_is_recovered_from_its_divisors(tmp_path: Path) -> None:
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


def test_f54_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    tiny_gguf.finish(writer)
    with pytest.raises(
        GgufError,
        match="'mamba' is not supported; supported: llama, qwen2, qwen3, gemma, gemma2, gemma3, phi3",
    ):
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


_COMMON: dict[str, Any] = {
    "context_length": 128,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "block_count": 2,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
}


def _header(arch: str, *tensors: GgufTensor, **fields: Any) -> GgufHeader:
    """A header of no file; `fields` are this architecture's, with __ for a dot."""
    named = _COMMON | {key.replace("__", "."): value for key, value in fields.items()}
    metadata = {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in named.items()}
    return GgufHeader(Path("m.gguf"), metadata, (GgufTensor("token_embd.weight", (8, 32), 0, 0), *tensors), 0, 32)


@pytest.mark.parametrize(
    ("arch", "num_blocks", "expected"),
    [("gemma2", 26, 16), ("gemma2", 46, 8), ("gemma3", 34, 16), ("gemma3", 62, 8)],
)
def test_the_widest_gemmas_scale_attention_by_their_width(arch: str, num_blocks: int, expected: int) -> None:
    config = model_config(_header(arch, block_count=num_blocks, attention__key_length=16))
    assert config["query_pre_attn_scalar"] == expected


def test_gemma_windows_follow_their_period() -> None:
    window, full = "sliding_attention", "full_attention"
    gemma2 = model_config(_header("gemma2", block_count=4))
    assert (gemma2["sliding_window"], gemma2["layer_types"]) == (4096, [window, full, window, full])
    assert (gemma2["attn_logit_softcapping"], gemma2["final_logit_softcapping"]) == (50.0, 30.0)
    gemma3 = model_config(_header("gemma3", block_count=7, attention__sliding_window=512))
    assert (gemma3["sliding_window"], gemma3["layer_types"]) == (512, [*[window] * 5, full, window])
    assert (gemma3["attn_logit_softcapping"], gemma3["final_logit_softcapping"]) == (None, None)


def test_a_file_may_state_its_own_windows() -> None:
    fields: dict[str, Any] = {"attention__sliding_window": 512, "block_count": 3}
    slides = {
        "by period": _header("gemma3", attention__sliding_window_pattern=3, **fields),
        "by list": _header("gemma3", attention__sliding_window_pattern=[True, True, False], **fields),
    }
    for header in slides.values():
        assert model_config(header)["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"]
    with pytest.raises(GgufError, match=r"sliding_window_pattern has 2 entries for 3 blocks"):
        model_config(_header("gemma3", attention__sliding_window_pattern=[True, False], **fields))
    assert model_config(_header("gemma3", block_count=3))["layer_types"] == ["full_attention"] * 3


def test_windows_that_a_family_lacks_are_refused_unless_they_span_the_context() -> None:
    assert "sliding_window" not in model_config(_header("qwen2", attention__sliding_window=128))
    with pytest.raises(GgufError, match=r"qwen2\.attention\.sliding_window is 64 and the context 128"):
        model_config(_header("qwen2", attention__sliding_window=64))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention__causal", False),
        ("attention__clamp_kqv", 8.0),
        ("attention__scale", 0.5),
        ("logit_scale", 0.25),
        ("use_parallel_residual", True),
        ("attention__value_length", 4),
    ],
)
def test_fields_that_change_the_arithmetic_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(GgufError, match=f"llama.{field.replace('__', '.')} is "):
        model_config(_header("llama", **{field: value}))


def test_neutral_values_are_taken() -> None:
    neutral: dict[str, Any] = {
        "attention__causal": True,
        "logit_scale": 1.0,
        "residual_scale": 0.0,
        "attention__value_length": 8,
    }
    assert model_config(_header("llama", **neutral)) == model_config(_header("llama"))


def test_one_file_of_several_is_refused_with_the_way_to_join_them() -> None:
    header = _header("llama")
    split = GgufHeader(header.path, {**header.metadata, "split.count": 3}, header.tensors, 0, 32)
    with pytest.raises(GgufError, match=r"split\.count is 3: .*llama-gguf-split --merge"):
        model_config(split)


def test_yarn_states_its_ramp_and_no_temperature() -> None:
    yarn: dict[str, Any] = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 32,
    }
    scaling = model_config(_header("qwen3", rope__scaling__yarn_beta_fast=16.0, **yarn))["rope_scaling"]
    assert scaling == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
    }
    with pytest.raises(GgufError, match=r"qwen3\.rope\.scaling\.yarn_attn_factor is 0\.8; supported: 1 or absent"):
        model_config(_header("qwen3", rope__scaling__yarn_attn_factor=0.8, **yarn))


def test_phi3_takes_both_tables_or_none(tmp_path: Path) -> None:
    short = GgufTensor("rope_factors_short.weight", (4,), 0, 0)
    with pytest.raises(GgufError, match=r"rope_factors_long\.weight is absent"):
        model_config(_header("phi3", short))
    with pytest.raises(GgufError, match=r"phi3\.rope\.scaling\.type is 'yarn' without"):
        model_config(_header("phi3", rope__scaling__type="yarn"))
    with pytest.raises(GgufError, match=r"rope_factors_short\.weight in architecture 'llama'"):
        model_config(_header("llama", short))


def test_a_temperature_of_its_own_is_told(tmp_path: Path) -> None:
    """Where the file's factor is not what readers compute from the two contexts."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "phi3")
    for add, value in (
        (writer.add_context_length, 128),
        (writer.add_embedding_length, 32),
        (writer.add_block_count, 1),
        (writer.add_feed_forward_length, 64),
        (writer.add_head_count, 4),
        (writer.add_rope_scaling_orig_ctx_len, 32),
    ):
        add(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_scaling_attn_factors(1.5)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), dtype=np.float32))
    for length in ("long", "short"):
        writer.add_tensor(f"rope_factors_{length}.weight", np.array([1, 2, 3, 4], dtype=np.float32))
    tiny_gguf.finish(writer)
    scaling = model_config(read_gguf_header(tmp_path / "m.gguf"))["rope_scaling"]
    assert scaling == {
        "rope_type": "longrope",
        "long_factor": [1.0, 2.0, 3.0, 4.0],
        "short_factor": [1.0, 2.0, 3.0, 4.0],
        "attention_factor": 1.5,
    }
