"""An fp8 KV cache: attention over what it holds against the fp64 oracle, its scales, saturation, blocks moved."""

from __future__ import annotations

import pytest
import torch
from kernel_steps import LAYER, Geometry, oracle, ragged_batch, run_steps

from kernels.api import Backend

FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _holds_fp8(backend: Backend) -> None:
    if backend.info.name == "cpu":
        with pytest.raises(ValueError, match="float8_e4m3fn is not one of"):
            Geometry(1, 1, 64, cache_dtype=FP8).allocate(backend, 1)
        pytest.skip("the cpu kernels refuse an fp8 cache")


@pytest.mark.parametrize("scales", [None, (0.02, 0.03)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_that_over_the_stored_numbers(
    backend: Backend, dtype: torch.dtype, scales: tuple[float, float] | None
) -> None:
    if backend.info.name == "triton" and dtype == torch.float32:
        pytest.skip("the GPU multiplies fp8 by 16-bit activations alone")
    geometry = Geometry(4, 2, 64, dtype=dtype, cache_dtype=FP8, scales=scales, qk_norm=True)
    lengths = (1, 40, 270)
    sequences = geometry.sequences(lengths)
    outputs, _ = run_steps(backend, geometry, sequences, [[(0, 1), (2, 200)], [(1, 40), (2, 69)], [(2, 1)]])
    for sequence, output in zip(sequences, outputs, strict=True):
        errors = (output.double() - oracle(geometry, sequence)).abs().amax(-1)
        # A number next to a rounding border may be stored a unit of fp8 off.
        assert errors.max() < 0.1
        assert errors.median() < (1e-4 if dtype == torch.float32 else 2.5e-2)


def test_numbers_too_large_saturate_and_blocks_move_whole(backend: Backend) -> None:
    geometry = Geometry(1, 1, 64, dtype=torch.bfloat16, cache_dtype=FP8, scales=(2.0, 4.0))
    cache = geometry.allocate(backend, 3)
    qkv = torch.full((2, geometry.width), 5000.0, dtype=torch.bfloat16)
    qkv[1] = 3.0
    plan = backend.plan_attention(ragged_batch([(2, 2, [1])]), cache)
    backend.rope_write_kv(qkv, cache, LAYER, plan, geometry.rope(), None)
    backend.copy_blocks(cache, [1], cache, [2])
    moved = backend.export_blocks(cache, LAYER, [2])
    assert moved.dtype == FP8
    assert moved[1, 0, 0, 0].float().unique().tolist() == [448.0]
    # 3 / 4, which e4m3 holds.
    assert moved[1, 0, 0, 1].float().unique().tolist() == [0.75]
    backend.import_blocks(cache, LAYER, [0], moved)
    assert torch.equal(backend.export_blocks(cache, LAYER, [0]).view(torch.uint8), moved.view(torch.uint8))
