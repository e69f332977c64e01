"""The arithmetic of memory: parameters, KV blocks, and the size of the pool."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.memory import DEFAULT_TOKENS_PER_SEQUENCE, RUNTIME_BYTES, KvRequest, ModelShape, predict, size_kv_pool
from octavo.precision import dtype_reason, resolve_dtype

GIB = 2**30
SMOL = ModelShape.from_config(
    json.loads(
        """{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 30, "hidden_size": 576,
        "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
        "max_position_embeddings": 8192, "tie_word_embeddings": true}"""
    )
)
NO_FLAGS: frozenset[str] = frozenset()
REQUEST = KvRequest(block_size=16, max_model_len=8192, max_num_seqs=64)


def test_the_parameters_of_a_known_model_are_counted() -> None:
    assert SMOL.head_dim == 64
    assert SMOL.num_parameters == 134_515_008  # as its model card and its file say


def test_an_untied_head_is_a_second_table() -> None:
    untied = replace(SMOL, tied_embeddings=False)
    assert untied.num_parameters - SMOL.num_parameters == 49152 * 576
    assert untied.weight_bytes("float32") == SMOL.weight_bytes("float32")


def test_a_block_holds_keys_and_values_of_every_layer() -> None:
    assert SMOL.kv_block_bytes(16, "bfloat16") == 2 * 30 * 3 * 64 * 16 * 2


def test_a_missing_field_is_named() -> None:
    with pytest.raises(KeyError, match="vocab_size"):
        ModelShape.from_config(
            {
                "architectures": ["LlamaForCausalLM"],
                "num_attention_heads": 1,
                "num_hidden_layers": 1,
                "hidden_size": 8,
                "intermediate_size": 8,
            }
        )


def test_the_first_size_that_is_given_decides() -> None:
    both = replace(REQUEST, num_kv_blocks=7, kv_cache_memory=GIB)
    assert (size_kv_pool(both, 1000, GIB).num_blocks, size_kv_pool(both, 1000, GIB).reason) == (7, "--num-kv-blocks")
    pool = size_kv_pool(replace(REQUEST, kv_cache_memory=10_500), 1000, GIB)
    assert (pool.num_blocks, pool.num_bytes, pool.reason) == (10, 10_000, "--kv-cache-memory")


def test_the_default_pool_takes_what_is_useful_and_no_more() -> None:
    pool = size_kv_pool(REQUEST, SMOL.kv_block_bytes(16, "bfloat16"), 24 * GIB)
    assert pool.num_tokens == 64 * DEFAULT_TOKENS_PER_SEQUENCE
    assert pool.num_bytes < 2 * GIB
    one = size_kv_pool(replace(REQUEST, max_num_seqs=1), 1, 24 * GIB)
    assert one.num_tokens == REQUEST.max_model_len


def test_the_default_pool_takes_its_share_where_memory_is_short() -> None:
    pool = size_kv_pool(REQUEST, 2**20, GIB)
    assert pool.num_blocks == 512
    assert pool.reason == "50% of the memory left free by the weights"


@given(
    free=st.integers(-(2**40), 2**40),
    fraction=st.floats(0.01, 0.95),
    seqs=st.integers(1, 4096),
    context=st.integers(1, 10**6),
    block_size=st.sampled_from([1, 16, 256]),
)
def test_the_default_pool_is_never_over_its_share_nor_negative(
    free: int, fraction: float, seqs: int, context: int, block_size: int
) -> None:
    request = KvRequest(block_size, context, seqs, kv_memory_fraction=fraction)
    pool = size_kv_pool(request, SMOL.kv_block_bytes(block_size, "float16"), free)
    assert 0 <= pool.num_bytes <= max(0, free)


def test_the_prediction_is_the_sum_of_its_parts() -> None:
    memory, pool = predict(SMOL, "float32", REQUEST, 512, 20 * GIB)
    rope_bytes = 8192 * 64 * 4  # a cosine and a sine for each of 32 pairs and 8192 positions
    assert memory.weight_bytes == (134_515_008 + 49152 * 576) * 4 + rope_bytes
    assert memory.kv_bytes == pool.num_bytes
    logits_bytes = 64 * 49152 * 4
    assert logits_bytes < memory.workspace_bytes < 8 * logits_bytes
    # 47 MB were measured for these 49,152 tokens.
    assert 47 * 2**20 < SMOL.grammar_bytes < 52 * 2**20
    assert memory.runtime_bytes == RUNTIME_BYTES + SMOL.grammar_bytes
    parts = (memory.runtime_bytes, memory.weight_bytes, memory.kv_bytes, memory.workspace_bytes)
    assert memory.total_bytes == sum(parts)


@pytest.mark.parametrize(
    ("requested", "stored", "flags", "dtype"),
    [
        ("float16", "bfloat16", set(), "float16"),
        ("auto", "float16", set(), "float16"),
        ("auto", None, {"avx512_bf16"}, "bfloat16"),
        ("auto", None, {"avx2"}, "float32"),
    ],
)
def test_precision_follows_request_then_checkpoint_then_cpu(
    requested: str, stored: str | None, flags: set[str], dtype: str
) -> None:
    assert resolve_dtype(requested, stored, frozenset(flags)) == dtype


def test_a_tied_head_is_held_beside_the_embedding_in_the_models_precision() -> None:
    assert SMOL.weight_bytes("bfloat16") == (134_515_008 + 49152 * 576) * 2


def test_the_precision_comes_with_its_reason() -> None:
    assert dtype_reason("float16", None, NO_FLAGS) == "as given"
    assert dtype_reason("auto", "float16", NO_FLAGS) == "the checkpoint's"
    assert "no bf16 instructions" in dtype_reason("auto", None, NO_FLAGS)


def test_the_host_tier_is_set_aside_before_the_pool_gets_its_share() -> None:
    alone, pool = predict(SMOL, "float32", REQUEST, 512, 4 * GIB)
    memory, smaller = predict(SMOL, "float32", replace(REQUEST, host_bytes=GIB), 512, 4 * GIB)
    assert pool.num_bytes - smaller.num_bytes == pytest.approx(GIB / 2, rel=0.01)
    assert memory.total_bytes - alone.total_bytes == pytest.approx(GIB / 2, rel=0.01)
