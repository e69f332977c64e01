"""Attention, rotary embedding and cache writes against the fp64 oracle, over shapes, dtypes and ragged batches."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_steps import Geometry, chunked, int32, oracle, ragged_batch, run_steps

from kernels.api import Backend

GEOMETRIES = {
    "mha-64": Geometry(4, 4, 64),
    "gqa-3-bf16": Geometry(9, 3, 64, dtype=torch.bfloat16, cache_dtype=torch.bfloat16),
    "mqa-80-block8": Geometry(8, 1, 80, block_size=8),
    "96-fp16-block32": Geometry(4, 2, 96, block_size=32, dtype=torch.float16, cache_dtype=torch.float16),
    "128-bf16-qknorm": Geometry(8, 2, 128, dtype=torch.bfloat16, cache_dtype=torch.bfloat16, qk_norm=True),
    "256-window-cap": Geometry(4, 2, 256, window=100, soft_cap=20.0),
    "window-partial-rope": Geometry(6, 2, 64, block_size=8, window=300, rotary_dim=32),
    "window-1": Geometry(2, 2, 64, window=1),
    "bf16-cache": Geometry(5, 1, 64, cache_dtype=torch.bfloat16, qk_norm=True),
}
# What one rounding to the type, of an output of magnitude up to about 4, may cost.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2.5e-2}

LENGTHS = (1, 17, 33, 257, 520)
# Prefill chunks and decode rows together; contexts end at and around the edges of blocks and partitions.
MIXED_STEPS = (
    [(0, 1), (1, 15), (3, 255)],
    [(1, 1), (2, 32), (3, 1), (4, 300)],
    [(3, 1), (2, 1), (4, 212), (1, 1)],
    [(4, 8)],
)


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_mixed_batches_match_the_oracle(backend: Backend, geometry: Geometry) -> None:
    sequences = geometry.sequences(LENGTHS)
    outputs, _ = run_steps(backend, geometry, sequences, MIXED_STEPS)
    for length, sequence, output in zip(LENGTHS, sequences, outputs, strict=True):
        assert output.dtype == geometry.dtype
        errors = (output.double() - oracle(geometry, sequence)).abs().amax(-1)
        # A key next to a rounding border may be stored one unit of the cache's precision off, and some tokens see it.
        coarser = max(TOLERANCES[geometry.dtype], TOLERANCES[geometry.cache_dtype])
        assert errors.max() < coarser, f"length {length}"
        assert errors.median() < TOLERANCES[geometry.dtype], f"length {length}"


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_a_reused_block_still_holds_does_not_matter(backend: Backend, poison: float) -> None:
    geometry = GEOMETRIES["gqa-3-bf16"]
    sequences = geometry.sequences(LENGTHS)
    clean, _ = run_steps(backend, geometry, sequences, MIXED_STEPS)
    dirty, _ = run_steps(backend, geometry, sequences, MIXED_STEPS, poison)
    for expected, output in zip(clean, dirty, strict=True):
        assert torch.equal(expected, output)


def test_large_scores_stay_finite(backend: Backend) -> None:
    geometry = Geometry(2, 1, 64)
    sequences = [sequence * 40 for sequence in geometry.sequences([300])]
    outputs, _ = run_steps(backend, geometry, sequences, list(chunked([300], 64)))
    assert (outputs[0].double() - oracle(geometry, sequences[0])).abs().max() < 5e-2


def test_queries_are_rotated_in_place_and_keys_stored(backend: Backend) -> None:
    geometry = Geometry(3, 1, 64, rotary_dim=32)
    cache = geometry.allocate(backend, 2)
    plan = backend.plan_attention(ragged_batch([(1, 1, [1])]), cache)
    qkv = geometry.sequences([1])[0]
    before = qkv.clone()
    # At position 0 the rotation is the identity.
    backend.rope_write_kv(qkv, cache, 1, plan, geometry.rope(), None)
    assert torch.equal(qkv[:, :192], before[:, :192])
    blocks = backend.export_blocks(cache, 1, [1])
    assert torch.equal(blocks[0, 0, 0, 0], before[0, 192:256])
    assert torch.equal(blocks[1, 0, 0, 0], before[0, 256:])
    assert not blocks[:, :, :, 1:].any()
    assert not backend.export_blocks(cache, 0, [1]).any()


FAULTY_ROWS = {
    "row 1 .*block table": [(1, 1, [0]), (1, 33, [0, 1])],
    "row 0 .*block outside": [(1, 1, [4])],
    "row 1 .*context length": [(1, 1, [0]), (3, 2, [1])],
}


@pytest.mark.parametrize("complaint", FAULTY_ROWS)
def test_a_faulty_batch_is_refused_with_its_row(backend: Backend, complaint: str) -> None:
    cache = Geometry(2, 1, 64).allocate(backend, 4)
    with pytest.raises(ValueError, match=complaint):
        backend.plan_attention(ragged_batch(FAULTY_ROWS[complaint]), cache)


def test_positions_must_be_the_last_of_the_context(backend: Backend) -> None:
    cache = Geometry(2, 1, 64).allocate(backend, 4)
    batch = ragged_batch([(1, 1, [0]), (2, 5, [1])])
    batch.positions.copy_(int32([0, 3, 3]))
    with pytest.raises(ValueError, match="row 1"):
        backend.plan_attention(batch, cache)
