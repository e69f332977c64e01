"""The extension's matrix product: the order of its sums, to the bit, and how narrowly weights are kept."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.cpu import CpuBackend, products
from kernels.cpu.extension import runnable_variants

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Fewer and more rows than a tile, than a task, and tiles that do not divide them.
ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 13, 31, 32, 64, 129)
# One panel and a part of one; depths that no vector divides; tasks whose rows a cache does not hold.
SHAPES = ((32, 40), (77, 129), (100, 2600))


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def chains(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The definition: a chain of fp32 FMAs over depth in ascending order, then the bias.

    A product of fp32 and bf16 is exact in fp64, and so, but for one case in 2^29, is the rounding of the sum to fp32.
    """
    sums = torch.zeros(len(x), len(weight))
    for k in range(x.shape[1]):
        sums = (sums.double() + x[:, k : k + 1].double() * weight[:, k].double()).float()
    return sums + bias


def pack(backend: CpuBackend, weight: Tensor, bias: Tensor | None = None) -> products.CpuLinear:
    packed = backend.pack_linear(weight, bias)
    if not isinstance(packed, products.CpuLinear):
        pytest.skip("weights of this type go through oneDNN here")
    return packed


@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_sums_are_chains_over_ascending_depth(variant: str, columns: int, depth: int) -> None:
    if variant == "portable":
        pytest.skip("rounds products before it adds them")
    weight, bias = randn(columns, depth, seed=1).to(BF16).float(), randn(columns, seed=2)
    x = randn(8, depth, seed=3)
    backend = CpuBackend(1, variant)
    assert torch.equal(backend.linear(x, pack(backend, weight, bias)), chains(x, weight, bias))


@pytest.mark.parametrize("kept", [BF16, FP16, FP32])
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_a_row_is_the_same_among_any_others(variant: str, kept: torch.dtype, columns: int, depth: int) -> None:
    weight = randn(columns, depth, seed=4).to(kept).float()
    x = randn(max(ROW_COUNTS), depth, seed=5)
    one = CpuBackend(1, variant)
    packed = pack(one, weight)
    assert packed.kept_in == str(kept).removeprefix("torch.")
    whole = one.linear(x, packed)
    torch.testing.assert_close(whole.double(), x.double() @ weight.double().T, rtol=1e-4, atol=1e-3)
    for num_threads in (1, 2, 3):
        backend = CpuBackend(num_threads, variant)
        for count in ROW_COUNTS:
            for begin in {0, len(x) - count}:
                rows = slice(begin, begin + count)
                assert torch.equal(backend.linear(x[rows], packed), whole[rows]), (num_threads, rows)


@pytest.mark.parametrize("kept", [BF16, FP16])
def test_weights_kept_in_16_bits_lose_nothing(variant: str, kept: torch.dtype) -> None:
    """One weight more that 16 bits do not hold, in a column of its own, has all of them kept in fp32."""
    narrow = randn(64, 200, seed=6).to(kept).float()
    wide = torch.cat((narrow, torch.full((1, 200), 1 + 2.0**-20)))
    x = randn(9, 200, seed=7)
    backend = CpuBackend(1, variant)
    packed, packed_wide = pack(backend, narrow), pack(backend, wide)
    assert (packed.kept_in, packed_wide.kept_in) == (str(kept).removeprefix("torch."), "float32")
    assert backend.info.kept_weights == ", ".join(sorted((packed.kept_in, "float32")))
    assert torch.equal(backend.linear(x, packed), backend.linear(x, packed_wide)[:, :64])


def spread(columns: int, depth: int, zeros: float, seed: int) -> Tensor:
    """bf16 weights whose columns differ in scale, a share of them zero."""
    scales = torch.exp2(randn(columns, 1, seed=seed))
    kept = torch.rand(columns, depth, generator=torch.Generator().manual_seed(seed + 1)) >= zeros
    return (randn(columns, depth, seed=seed + 2) * scales * kept).to(BF16)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("zeros", [0.0, 0.02])
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_coded_weights_give_the_bits_of_plain_ones(
    variant: str, dtype: torch.dtype, zeros: float, columns: int, depth: int
) -> None:
    weight = spread(columns, depth, zeros, seed=17).to(dtype)
    # Numbers that no table of the others' high bytes holds: depths with them are kept apart, the first and last too.
    for k in (0, depth // 2, depth - 1):
        weight[k % columns, k] = -(2.0**-100)
    x = randn(7, depth, seed=18).to(dtype)
    for num_threads in (1, 2):
        backend = CpuBackend(num_threads, variant)
        packed = pack(backend, weight)
        plain = [backend.linear(x[:count], packed) for count in range(1, 8)]
        assert packed.copy.panels is None
        most_bytes = backend.info.copy_bytes
        backend.make_copies(lambda: True)
        coded = [backend.linear(x[:count], packed) for count in range(1, 8)]
        assert packed.copy.panels is not None
        assert len(packed.copy.panels) == backend.info.copy_bytes <= most_bytes < len(packed.panels)
        assert all(map(torch.equal, plain, coded))


def blocks(columns: int, depth: int, bits: int, seed: int) -> Tensor:
    """fp32 weights as of GGUF's Q4_1 or Q8_0: blocks of 32 depths with an fp16 step and, for 4 bits, an fp16 least."""
    shape = (columns, depth // 32, 32)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(*((0, 16) if bits == 4 else (-127, 128)), shape, generator=generator)
    codes[..., 3], codes[..., 20] = (0, 15) if bits == 4 else (-127, 5)  # as in a block that was quantized
    steps = randn(*shape[:2], 1, seed=seed + 1).abs().half().float()
    leasts = randn(*shape[:2], 1, seed=seed + 2).half().float() if bits == 4 else torch.zeros(*shape[:2], 1)
    steps[0, 0] = 0
    return (steps.double() * codes + leasts.double()).float().reshape(columns, depth)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("columns", "depth"), [(32, 32), (70, 160), (100, 2592)])
def test_dequantized_blocks_are_kept_in_blocks_and_lose_nothing(
    variant: str, bits: int, columns: int, depth: int
) -> None:
    """One weight more that no block holds, in a column of its own, has all of them kept in fp32."""
    weight = blocks(columns, depth, bits, seed=23)
    stray = torch.cat((weight, randn(1, depth, seed=24)))
    x = randn(max(ROW_COUNTS), depth, seed=25)
    for num_threads in (1, 2):
        backend = CpuBackend(num_threads, variant)
        packed, packed_stray = pack(backend, weight), pack(backend, stray)
        assert (packed.kept_in, packed_stray.kept_in) == (f"blocks of {bits} bits", "float32")
        kept_bytes = len(packed.panels) + len(packed_stray.panels)
        assert backend.info.saved_bytes == weight.nbytes + stray.nbytes - kept_bytes
        whole = backend.linear(x, packed_stray)[:, :columns]
        for count in ROW_COUNTS:
            assert torch.equal(backend.linear(x[:count], packed), whole[:count]), (num_threads, count)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0, 1e-42])
def test_what_blocks_would_change_is_kept_in_fp32(backend: CpuBackend, value: float) -> None:
    weight = blocks(40, 64, 4, seed=26)
    assert pack(backend, weight).kept_in == "blocks of 4 bits"
    weight[7, 40] = value
    packed = pack(backend, weight)
    assert packed.kept_in == "float32"
    identity = torch.eye(64)
    if math.isfinite(value):
        assert torch.equal(backend.linear(identity, packed), weight.T)


def test_what_codes_do_not_shorten_is_kept_once(backend: CpuBackend) -> None:
    """High bytes all over, or no memory left for a second copy."""
    exponents = torch.randint(-60, 60, (64, 100), generator=torch.Generator().manual_seed(19))
    weights = [torch.exp2(exponents.float())]
    weights += [randn(64, 100, seed=seed).to(BF16).float() for seed in (20, 21, 22)]
    most_bytes = 3 * 64 * 100
    scarce = CpuBackend(1, backend.info.variant.split("+")[0], max_coded_bytes=most_bytes)
    packed = [pack(scarce, weight) for weight in weights]
    assert scarce.info.copy_bytes == most_bytes
    scarce.make_copies(lambda: True)
    scarce.linear(torch.zeros(1, 100), packed[0])
    assert [each.copy.panels is not None for each in packed] == [False, True, False, False]
    assert 0 < scarce.info.copy_bytes < most_bytes


def test_copies_are_made_for_as_long_as_they_may(backend: CpuBackend) -> None:
    made = CpuBackend(1, backend.info.variant.split("+")[0])
    packed = [pack(made, randn(64, 100, seed=seed).to(BF16).float()) for seed in (27, 28, 29)]
    answers = iter((True, True, False))
    made.make_copies(lambda: next(answers))
    made.linear(torch.zeros(1, 100), packed[0])
    assert [each.copy.panels is not None for each in packed] == [True, True, False]
    made.make_copies(lambda: True)
    made.linear(torch.zeros(1, 100), packed[0])
    assert packed[2].copy.panels is not None


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_16_bit_rows_are_widened_and_results_rounded_once(variant: str, dtype: torch.dtype) -> None:
    weight, bias = randn(70, 130, seed=8).to(dtype), randn(70, seed=9).to(dtype)
    x = randn(11, 130, seed=10).to(dtype)
    backend = CpuBackend(2, variant)
    packed = pack(backend, weight, bias)
    wide = pack(backend, weight.float(), bias.float())
    assert packed.kept_in == str(dtype).removeprefix("torch.")
    assert torch.equal(backend.linear(x, packed), backend.linear(x.float(), wide).to(dtype))


def test_avx512_and_avx2_multiply_alike() -> None:
    if not {"avx512", "avx2"} <= set(runnable_variants()):
        pytest.skip(f"this processor runs {', '.join(runnable_variants())}")
    weight, x = randn(100, 300, seed=11), randn(30, 300, seed=12)
    results = [backend.linear(x, pack(backend, weight)) for backend in (CpuBackend(1, "avx512"), CpuBackend(1, "avx2"))]
    assert torch.equal(*results)


def test_the_packed_weight_is_a_copy(backend: CpuBackend) -> None:
    weight, x = randn(40, 50, seed=13), randn(3, 50, seed=14)
    packed = pack(backend, weight, weight[:, 0])
    before = backend.linear(x, packed)
    weight.zero_()
    assert torch.equal(backend.linear(x, packed), before)


def test_no_rows_give_none(backend: CpuBackend) -> None:
    assert backend.linear(torch.empty(0, 50), pack(backend, randn(40, 50, seed=16))).shape == (0, 40)


def test_what_does_not_fit_the_weight_is_refused(backend: CpuBackend) -> None:
    packed = pack(backend, randn(40, 50, seed=15))
    for x in (randn(2, 49, seed=0), randn(2, 50, seed=0).double()):
        with pytest.raises(ValueError, match=r"the weight takes \[num_tokens, 50\] torch.float32"):
            backend.linear(x, packed)
    with pytest.raises(ValueError, match="must be \\[out_features, in_features\\]"):
        backend.pack_linear(torch.zeros(4), None)
    with pytest.raises(ValueError, match="bias"):
        backend.pack_linear(torch.zeros(4, 3), torch.zeros(3))
