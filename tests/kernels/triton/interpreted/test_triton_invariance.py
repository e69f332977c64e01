"""Batch invariance of the Triton kernels, bitwise: company, chunk lengths, programs and rounds change no bit."""

from __future__ import annotations

import pytest
import torch
from interpreter import interpreted_backend
from kernel_steps import Geometry, Step, chunked, run_steps
from torch import Tensor

BF16 = torch.bfloat16
LENGTHS = (1, 40, 300)
GEOMETRIES = {
    "gqa": Geometry(4, 2, 64, dtype=BF16, cache_dtype=BF16),
    "window-cap-fp8": Geometry(
        3, 1, 80, dtype=BF16, cache_dtype=torch.float8_e4m3fn, window=70, soft_cap=15.0, scales=(0.02, 0.03)
    ),
}
SCHEDULES: dict[str, list[Step]] = {
    "chunks of 128": list(chunked(LENGTHS, 128)),
    "prefill beside decode": [[(2, 255)], [(2, 1), (1, 7)], [(2, 1), (0, 1), (1, 1)], [(1, 32), (2, 43)]],
    "the last tokens one by one": [[(2, 295), (1, 40)], *([(2, 1)] for _ in range(5)), [(0, 1)]],
}


def alone(geometry: Geometry, sequences: list[Tensor]) -> list[Tensor]:
    """Each sequence by itself, its prompt whole."""
    backend = interpreted_backend(num_multiprocessors=3)
    return [run_steps(backend, geometry, [sequence], [[(0, len(sequence))]])[0][0] for sequence in sequences]


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_attention_over_chunkings_and_company(geometry: Geometry) -> None:
    sequences = geometry.sequences(LENGTHS)
    expected = alone(geometry, sequences)
    for name, steps in SCHEDULES.items():
        outputs, _ = run_steps(interpreted_backend(num_multiprocessors=1), geometry, sequences, steps)
        for output, single in zip(outputs, expected, strict=True):
            assert torch.equal(output, single), f"{name}, length {len(single)}"


def test_decode_in_rounds_of_scratch_memory() -> None:
    geometry = Geometry(2, 1, 64, dtype=BF16, cache_dtype=BF16)
    sequences = geometry.sequences((520, 1, 260))
    steps: list[Step] = [[(0, 519), (2, 259)], [(2, 1), (0, 1), (1, 1)]]
    whole, _ = run_steps(interpreted_backend(), geometry, sequences, steps)
    # One partition's partial results take 2 * 66 * 4 bytes: rounds of one and of four of the six partitions.
    for num_partitions in (1, 4):
        backend = interpreted_backend(scratch_bytes=num_partitions * 2 * 66 * 4)
        outputs, _ = run_steps(backend, geometry, sequences, steps)
        assert all(torch.equal(a, b) for a, b in zip(outputs, whole, strict=True)), num_partitions


def test_decode_is_the_same_alone_and_in_a_batch_without_the_mode_too() -> None:
    geometry = GEOMETRIES["gqa"]
    sequences = geometry.sequences((300, 20, 270))
    steps: list[Step] = [[(0, 299)], [(1, 19)], [(2, 269)]]
    company, _ = run_steps(interpreted_backend(False), geometry, sequences, [*steps, [(1, 1), (0, 1), (2, 1)]])
    other = interpreted_backend(False, num_multiprocessors=5)
    single, _ = run_steps(other, geometry, sequences[:1], [steps[0], [(0, 1)]])
    assert torch.equal(company[0], single[0])


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_rows_of_products_norms_and_activations(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 160, generator=generator).to(dtype)
    weight = torch.randn(100, 160, generator=generator).to(dtype)
    backend = interpreted_backend()
    packed = backend.pack_linear(weight, weight[:, 0].clone())
    whole = [backend.linear(x, packed), backend.rms_norm(x[:40], weight[0], 1e-6), backend.silu_mul(x[:40])]
    # More rows than 256 take another configuration.
    for begin, end in ((0, 1), (7, 40), (30, 32)):
        rows = x[begin:end].clone()
        parts = [backend.linear(rows, packed), backend.rms_norm(rows, weight[0], 1e-6), backend.silu_mul(rows)]
        for part, full in zip(parts, whole, strict=True):
            assert torch.equal(part, full[begin:end])
