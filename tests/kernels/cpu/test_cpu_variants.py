"""Each instruction set's kernels against the reference and against themselves cut differently."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from kernel_samples import RowParameters, sampling_batch
from kernel_steps import Geometry, chunked, run_steps
from torch import Tensor

from kernels.cpu import CpuBackend
from kernels.cpu.extension import runnable_variants
from kernels.reference import ReferenceBackend

BF16 = torch.bfloat16
GEOMETRIES = {
    "bf16": Geometry(9, 3, 64, dtype=BF16, cache_dtype=BF16),
    "bf16-block2-norm": Geometry(4, 2, 80, block_size=2, dtype=BF16, cache_dtype=BF16, qk_norm=True, rotary_dim=40),
    "fp32-window-cap": Geometry(6, 2, 128, window=70, soft_cap=15.0),
    "fp16": Geometry(7, 1, 96, block_size=32, dtype=torch.float16, cache_dtype=torch.float16),
    "fp32-on-bf16-window": Geometry(2, 2, 64, block_size=256, cache_dtype=BF16, window=33),
    "many-heads": Geometry(56, 1, 16, dtype=BF16, cache_dtype=BF16, window=129),
}
LENGTHS = (1, 2, 30, 255, 256, 300, 530)
TOLERANCES = {torch.float32: 3e-5, torch.float16: 4e-3, BF16: 3e-2}


def outputs(
    backend: CpuBackend | ReferenceBackend, geometry: Geometry, steps: Sequence[list[tuple[int, int]]]
) -> Tensor:
    """All attention outputs, sequence by sequence, in one tensor."""
    return torch.cat(run_steps(backend, geometry, geometry.sequences(LENGTHS), steps)[0])


WHOLE = [list(enumerate(LENGTHS))]


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_attention_matches_the_reference(backend: CpuBackend, geometry: Geometry) -> None:
    expected = outputs(ReferenceBackend(), geometry, WHOLE)
    worst = (outputs(backend, geometry, WHOLE).double() - expected.double()).abs().max()
    assert worst < TOLERANCES[geometry.dtype]


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_attention_is_bitwise_the_same_however_it_is_cut(variant: str, geometry: Geometry) -> None:
    """Whole prompts, odd chunks, and one token at a time where few tasks make threads share a row's partitions."""
    expected = outputs(CpuBackend(1, variant), geometry, WHOLE)
    chunks = [list(step) for step in chunked(LENGTHS, 37)]
    assert torch.equal(expected, outputs(CpuBackend(3, variant), geometry, chunks))
    alone = geometry.sequences(LENGTHS)[-1:]
    decode = [[(0, 511)], *([(0, 1)] for _ in range(19))]
    single = run_steps(CpuBackend(4, variant), geometry, alone, decode)[0][0]
    assert torch.equal(expected[-LENGTHS[-1] :], single)


def test_block_sizes_do_not_change_a_bit(variant: str) -> None:
    results = []
    for block_size in (2, 8, 16, 64):
        geometry = Geometry(4, 2, 64, block_size=block_size, dtype=BF16, cache_dtype=BF16, window=90)
        results.append(outputs(CpuBackend(1, variant), geometry, WHOLE))
    assert all(torch.equal(results[0], result) for result in results[1:])


@pytest.mark.parametrize("width", [16, 40, 577])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_dense_kernels_match_the_reference(backend: CpuBackend, dtype: torch.dtype, width: int) -> None:
    reference = ReferenceBackend()
    generator = torch.Generator().manual_seed(width)
    x, residual, gate = (torch.randn(5, width, generator=generator) * 6 for _ in range(3))
    weight = torch.rand(width, generator=generator)
    close = partial(torch.testing.assert_close, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    for residual_dtype in (dtype, torch.float32):
        mine, theirs = (residual.to(residual_dtype, copy=True) for _ in range(2))
        out = backend.add_rms_norm(x.to(dtype), mine, weight.to(dtype), 1e-6)
        expected = reference.add_rms_norm(x.to(dtype), theirs, weight.to(dtype), 1e-6)
        assert torch.equal(mine, theirs)
        close(out, expected)
    gate_up = torch.cat((gate, x), 1).to(dtype)
    close(backend.silu_mul(gate_up), reference.silu_mul(gate_up))


def test_special_values_survive_each_type(backend: CpuBackend) -> None:
    """NaN stays NaN, and the largest and smallest numbers of a type keep their bits through load and store."""
    for dtype in (torch.float32, BF16, torch.float16):
        info = torch.finfo(dtype)
        up = torch.tensor([[info.max, info.min, info.tiny, info.smallest_normal / 2, 0.0, torch.nan]], dtype=dtype)
        # silu(x) is x for a large x, so that 2^6 * up / 2^6 is up.
        gate = torch.full_like(up, 64.0)
        scaled = (up.double() / 64).to(dtype)
        result = backend.silu_mul(torch.cat((gate, scaled), 1))
        expected = (scaled.double() * 64).to(dtype)
        assert torch.equal(result[0, :5], expected[0, :5]), dtype
        assert result[0, 5].isnan()


SAMPLING_ROWS = [
    RowParameters(),
    RowParameters(temperature=1.0, seed=1, position=3),
    RowParameters(temperature=0.7, seed=-2, top_k=40, position=2**40),
    RowParameters(temperature=1.3, seed=3, top_p=0.8),
    RowParameters(temperature=5.0, seed=4, top_p=0.97),
    RowParameters(temperature=1.0, seed=5, top_k=500, top_p=0.9, min_p=0.01),
    RowParameters(temperature=0.9, seed=6, min_p=0.05, prompt=(1, 2, 2), output=(7, 7, 9), repetition=1.3),
    RowParameters(temperature=1.0, seed=7, output=(5, 5), frequency=0.5, presence=0.25, bias={3: 9.0, 5: 4.0}),
    RowParameters(forbidden=(0, 1, 2), bias={4: 100.0}),
    RowParameters(temperature=1e-3, seed=8, top_p=0.5),
    RowParameters(temperature=1.0, seed=9, top_k=100_000),
]


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_sampling_matches_the_reference(variant: str, dtype: torch.dtype, spread: float) -> None:
    """A vocabulary wide enough for every shortcut: the pruned draw, candidates by distance, the radix sort."""
    vocab_size, padded = 20_011, 20_032
    generator = torch.Generator().manual_seed(int(spread * 10))
    logits = (torch.randn(len(SAMPLING_ROWS), padded, generator=generator) * spread).to(dtype)
    logits[:, vocab_size:] = torch.inf
    batch = sampling_batch(SAMPLING_ROWS, vocab_size, logprob_rows=range(0, len(SAMPLING_ROWS), 2), num_top=20)
    expected = ReferenceBackend().sample(logits, batch)
    result = CpuBackend(1, variant).sample(logits, batch)
    assert result.finite.all()
    assert torch.equal(result.token_ids, expected.token_ids)
    assert result.logprobs is not None
    assert expected.logprobs is not None
    assert torch.equal(result.logprobs.top_ids, expected.logprobs.top_ids)
    torch.testing.assert_close(result.logprobs.token_logprobs, expected.logprobs.token_logprobs, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(result.logprobs.top_logprobs, expected.logprobs.top_logprobs, rtol=1e-6, atol=2e-6)
    threaded = CpuBackend(3, variant).sample(logits, batch)
    assert torch.equal(threaded.token_ids, result.token_ids)
    assert threaded.logprobs is not None
    assert torch.equal(threaded.logprobs.top_logprobs, result.logprobs.top_logprobs)


def test_avx512_and_avx2_agree_in_every_bit() -> None:
    """Both fuse the same operations and sum lanes in the same tree."""
    if not {"avx512", "avx2"} <= set(runnable_variants()):
        pytest.skip(f"this processor runs {', '.join(runnable_variants())}")
    for geometry in GEOMETRIES.values():
        assert torch.equal(*(outputs(CpuBackend(1, name), geometry, WHOLE) for name in ("avx512", "avx2")))


def test_an_unknown_variant_is_refused_with_those_that_run(variant: str) -> None:
    with pytest.raises(ValueError, match=f"'sse9'.*{variant}"):
        CpuBackend(1, "sse9")


def test_threads_are_torchs_too(variant: str) -> None:
    before = torch.get_num_threads()
    try:
        backend = CpuBackend(2, variant)
        assert (backend.num_threads, torch.get_num_threads()) == (2, 2)
        backend.set_num_threads(1)
        assert (backend.num_threads, torch.get_num_threads()) == (1, 1)
        with pytest.raises(ValueError, match="0"):
            backend.set_num_threads(0)
    finally:
        torch.set_num_threads(before)
