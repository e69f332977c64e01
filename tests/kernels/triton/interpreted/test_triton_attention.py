"""Attention, rotation and cache writes of the Triton kernels against the fp64 oracle and the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_checks import BF16, FP8, FP16, LENGTHS, STEPS, TOLERANCES, assert_near_oracle
from interpreter import install, interpreted_backend, sanitizer
from kernel_steps import LAYER, Geometry, Step, int32, ragged_batch, run_steps

from kernels.api import RaggedBatch
from kernels.reference import ReferenceBackend

install()
from kernels.triton.cache import TritonCache  # noqa: E402


def bf16(num_heads: int, num_kv_heads: int, head_dim: int, **options: object) -> Geometry:
    return Geometry(num_heads, num_kv_heads, head_dim, **{"dtype": BF16, "cache_dtype": BF16, **options})  # type: ignore[arg-type]


GEOMETRIES = {
    "mha-64": bf16(2, 2, 64),
    "gqa4-128-block32-qknorm": bf16(4, 1, 128, block_size=32, qk_norm=True),
    "gqa7-80-block64-fp16": bf16(7, 1, 80, block_size=64, dtype=FP16, cache_dtype=FP16),
    "gqa3-96-window": bf16(6, 2, 96, window=100, rotary_dim=48),
    "mqa8-64-cap-fp16": bf16(8, 1, 64, dtype=FP16, cache_dtype=FP16, soft_cap=20.0),
    "256-window-cap-block64": bf16(2, 1, 256, block_size=64, window=70, soft_cap=30.0),
    "fp8-128": bf16(4, 1, 128, cache_dtype=FP8, scales=(0.02, 0.03)),
}


def assert_matches_oracle(geometry: Geometry, partitioned: bool, lengths=LENGTHS, steps=STEPS) -> None:
    sequences = geometry.sequences(lengths)
    outputs, _ = run_steps(interpreted_backend(partitioned), geometry, sequences, steps)
    assert_near_oracle(geometry, sequences, outputs)


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_mixed_batches_match_the_oracle(geometry: Geometry) -> None:
    assert_matches_oracle(geometry, partitioned=list(GEOMETRIES.values()).index(geometry) % 2 == 0)


@pytest.mark.parametrize("partitioned", [False, True])
def test_fp32_matches_the_oracle(partitioned: bool) -> None:
    geometry = Geometry(2, 1, 64, rotary_dim=32, qk_norm=True)
    assert_matches_oracle(geometry, partitioned, (1, 40), ([(0, 1), (1, 30)], [(1, 10)]))


def test_agrees_with_the_reference() -> None:
    geometry = GEOMETRIES["gqa4-128-block32-qknorm"]
    sequences = geometry.sequences(LENGTHS)
    ours, our_queries = run_steps(interpreted_backend(False), geometry, sequences, STEPS)
    theirs, their_queries = run_steps(ReferenceBackend(), geometry, sequences, STEPS)
    for output, expected in zip(ours, theirs, strict=True):
        assert (output.float() - expected.float()).abs().max() < TOLERANCES[BF16]
    for query, expected in zip(our_queries, their_queries, strict=True):
        # One rounding each, from fp32 numbers that differ in the last place.
        assert (query.float() - expected.float()).abs().max() <= expected.float().abs().max() * 2**-7


def padded_batch() -> RaggedBatch:
    """Decode rows of a CUDA graph's batch: two sequences, then padding."""
    batch = ragged_batch([(1, 300, range(19)), (1, 20, [19, 20]), (1, 1, [0]), (1, 1, [0])])
    batch.context_lens[2:] = 0
    batch.positions[2:] = 0
    return batch


def test_padding_rows_store_nothing_and_give_zero() -> None:
    geometry = GEOMETRIES["mha-64"]
    backend = interpreted_backend()
    cache = geometry.allocate(backend, 21)
    qkv = torch.cat(geometry.sequences([4]))
    before = qkv.clone()
    plan = backend.plan_attention(padded_batch(), cache)
    backend.rope_write_kv(qkv, cache, LAYER, plan, geometry.rope(), None)
    out = backend.attention(qkv, cache, LAYER, plan, geometry.spec)
    assert torch.equal(qkv[2:], before[2:])
    assert not torch.equal(qkv[:2], before[:2])
    assert not out[2:].any()
    assert out[:2].any(1).all()
    stored = backend.export_blocks(cache, LAYER, range(21))[0].any(-1).any(1)
    assert stored.nonzero().tolist() == [[18, 299 - 18 * 16], [20, 3]]


@pytest.mark.parametrize("name", ["mha-64", "fp8-128"])
def test_what_is_no_number_is_stored_as_none_and_shows(name: str) -> None:
    """An fp8 cache saturates infinities; NaN must reach the logits, which end the request."""
    geometry = GEOMETRIES[name]
    backend = interpreted_backend()
    cache = geometry.allocate(backend, 1)
    qkv = torch.cat(geometry.sequences([2]))
    width = geometry.head_dim
    qkv[0, -width] = torch.nan
    qkv[1, -width] = torch.inf
    plan = backend.plan_attention(ragged_batch([(2, 2, [0])]), cache)
    backend.rope_write_kv(qkv, cache, LAYER, plan, geometry.rope(), None)
    values = backend.export_blocks(cache, LAYER, [0])[1, 0, -1, :2, 0].float()
    assert values.isnan().tolist() == [True, False]
    assert values[1] == (448.0 if geometry.cache_dtype == FP8 else torch.inf)
    assert backend.attention(qkv, cache, LAYER, plan, geometry.spec).isnan().any(1).all()


def test_a_faulty_row_is_computed_as_empty_where_nobody_waits_for_the_device() -> None:
    geometry = GEOMETRIES["mha-64"]
    backend = interpreted_backend()
    backend._check_faults = False
    cache = geometry.allocate(backend, 21)
    batch = padded_batch()
    batch.block_tables[0, 3] = 21
    batch.positions[1] = 5
    plan = backend.plan_attention(batch, cache)
    assert plan.faults.tolist() == [5, 6, 0, 0]
    qkv = torch.cat(geometry.sequences([4]))
    with sanitizer():
        backend.rope_write_kv(qkv, cache, LAYER, plan, geometry.rope(), None)
        assert not backend.attention(qkv, cache, LAYER, plan, geometry.spec).any()
    assert not backend.export_blocks(cache, LAYER, range(21)).any()


@pytest.mark.parametrize(
    "faulty",
    [{"query_starts": [0, 1, 1, 4]}, {"query_starts": [0, 1, 2, 3]}, {"query_starts": [1, 2, 3, 4]}],
)
def test_query_starts_must_ascend_over_all_tokens(faulty: dict[str, list[int]]) -> None:
    geometry = GEOMETRIES["mha-64"]
    backend = interpreted_backend()
    batch = ragged_batch([(1, 1, [0]), (1, 1, [1]), (2, 2, [2])])
    broken = replace(batch, **{name: int32(values) for name, values in faulty.items()})
    with sanitizer(), pytest.raises(ValueError, match=r"row \d .*query_starts"):
        backend.plan_attention(broken, geometry.allocate(backend, 4))


def test_a_row_with_tokens_that_the_step_has_not_touches_no_memory() -> None:
    geometry = GEOMETRIES["mha-64"]
    backend = interpreted_backend()
    backend._check_faults = False
    cache = geometry.allocate(backend, 4)
    batch = replace(ragged_batch([(1, 1, [0]), (1, 1, [1]), (2, 2, [2])]), query_starts=int32([0, 5, 6, 4]))
    qkv = torch.cat(geometry.sequences([4]))
    with sanitizer():
        plan = backend.plan_attention(batch, cache)
        assert plan.faults.tolist() == [2, 2, 1]
        backend.attention(qkv, cache, LAYER, plan, geometry.spec)


@pytest.mark.parametrize("geometry", [GEOMETRIES["gqa3-96-window"], GEOMETRIES["fp8-128"]], ids=["window", "fp8"])
def test_every_address_is_inside_its_tensors_and_no_programs_race(geometry: Geometry) -> None:
    steps: list[Step] = [[(0, 1), (2, 69)], [(2, 1), (1, 33)]]
    with sanitizer() as launches:
        run_steps(interpreted_backend(), geometry, geometry.sequences((1, 33, 70)), steps)
    assert launches.num_addresses > 100_000


def test_offsets_past_two_billion_elements() -> None:
    """Keys of over 2^31 elements, in memory whose pages exist only where they are touched."""
    geometry = bf16(2, 1, 64, block_size=32, cache_dtype=FP8)
    backend = interpreted_backend()
    num_blocks = (1 << 31) // (32 * 64) + 4
    spec = replace(geometry.allocate(backend, 1).spec, num_blocks=num_blocks)
    data = torch.empty((2, 2, num_blocks, 1, 32, 64), dtype=FP8)
    cache = TritonCache(spec, data, tuple((layer[0], layer[1]) for layer in data))
    batch = ragged_batch([(3, 35, [num_blocks - 1, num_blocks - 2])])
    qkv = torch.cat(geometry.sequences([3]))
    with sanitizer():
        plan = backend.plan_attention(batch, cache)
        backend.rope_write_kv(qkv, cache, LAYER, plan, geometry.rope(), None)
        backend.attention(qkv, cache, LAYER, plan, geometry.spec)
    assert backend.export_blocks(cache, LAYER, [num_blocks - 2])[0].view(torch.uint8).any(-1).nonzero().tolist() == [
        [0, 0, 0],
        [0, 0, 1],
        [0, 0, 2],
    ]
