"""Products with quantized weights against the dequantized ones in fp64, and their rows in any company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from interpreter import install, sanitizer
from torch import Tensor

install()
from kernels.quantized import GroupedWeight, QuantizedWeight, ScaledWeight, columns_of  # noqa: E402
from kernels.reference.quantized import dequantize, quantize_grouped, quantize_scaled  # noqa: E402
from kernels.triton import quantized, quantized_layout  # noqa: E402
from kernels.triton.linear import TritonLinear  # noqa: E402

CPU = torch.device("cpu")
BF16, FP16 = torch.bfloat16, torch.float16


def random_weight(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) / 8


def shuffled(weight: GroupedWeight) -> GroupedWeight:
    """Inputs dealt over the groups in turn, as desc_act does in its way."""
    num_groups = weight.scales.shape[1]
    return replace(weight, groups=torch.arange(weight.shape[1]) % num_groups)


def int8(weight: Tensor) -> ScaledWeight:
    scales = weight.abs().amax(1, keepdim=True) / 127
    return ScaledWeight((weight / scales).round().to(torch.int8), scales, (1, weight.shape[1]))


WEIGHTS: dict[str, QuantizedWeight] = {
    "fp8 tensor": quantize_scaled(random_weight(72, 160), (999, 999)),
    "fp8 channel": quantize_scaled(random_weight(70, 256), (1, 999)),
    "fp8 block": quantize_scaled(random_weight(136, 272), (128, 128)),
    "int8": int8(random_weight(64, 128)),
    "int4 groups of 128": quantize_grouped(random_weight(72, 256), 128),
    "int4 groups of 32": quantize_grouped(random_weight(64, 96), 32),
    "int4 one group": quantize_grouped(random_weight(64, 256), 256),
    "int4 groups of 48": quantize_grouped(random_weight(64, 96), 48),
    "int4 part of groups": columns_of(quantize_grouped(random_weight(64, 256), 128), range(64, 256)),
    "int4 part of desc_act": columns_of(shuffled(quantize_grouped(random_weight(64, 256), 64)), range(37, 200)),
    "fp8 part of blocks": columns_of(quantize_scaled(random_weight(64, 256), (128, 128)), range(64, 256)),
    "int4 desc_act": shuffled(quantize_grouped(random_weight(64, 128), 64)),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_products_are_those_of_the_dequantized_weight(name: str, dtype: torch.dtype) -> None:
    weight = WEIGHTS[name]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, weight.shape[1], generator=generator).to(dtype)
    bias = torch.randn(weight.shape[0], generator=generator).to(dtype)
    packed = quantized_layout.pack(weight, bias, dtype, CPU)
    assert not isinstance(packed, TritonLinear)
    assert (packed.out_features, packed.in_features) == weight.shape
    found = quantized.linear(x, packed, invariant=False)
    truth = x.double() @ dequantize(weight).double().T + bias.double()
    assert found.dtype == dtype
    # The sums are fp32 of exact products: one rounding of the result is all that shows.
    assert ((found.double() - truth).abs() <= truth.abs() * torch.finfo(dtype).eps / 2 + 1e-4).all()


def test_every_e4m3_number_becomes_itself() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    bits = bits[(bits & 0x7F) != 0x7F]
    values = bits.view(torch.float8_e4m3fn)[:, None].repeat(1, 32)
    weight = ScaledWeight(values, torch.ones(1, 1), (254, 32))
    x = torch.zeros(1, 32)
    x[0, 3] = 1.0
    for dtype in (BF16, FP16):
        packed = quantized_layout.pack(weight, None, dtype, CPU)
        assert not isinstance(packed, TritonLinear)
        found = quantized.linear(x.to(dtype), packed, invariant=False)[0]
        assert torch.equal(found.float(), bits.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("name", ["fp8 block", "int4 desc_act"])
def test_a_row_alone_is_the_row_in_a_batch(name: str) -> None:
    weight = WEIGHTS[name]
    x = torch.randn(40, weight.shape[1], generator=torch.Generator().manual_seed(2)).to(BF16)
    packed = quantized_layout.pack(weight, None, BF16, CPU)
    assert not isinstance(packed, TritonLinear)
    for invariant in (True, False):
        whole = quantized.linear(x, packed, invariant)
        for begin, end in ((0, 1), (7, 30)):
            assert torch.equal(quantized.linear(x[begin:end], packed, invariant), whole[begin:end])


@pytest.mark.parametrize("name", ["fp8 block", "int4 groups of 128", "int4 part of desc_act"])
def test_every_address_is_inside_its_tensors_and_no_programs_race(name: str) -> None:
    weight = WEIGHTS[name]
    packed = quantized_layout.pack(weight, None, BF16, CPU)
    assert not isinstance(packed, TritonLinear)
    with sanitizer() as launches:
        quantized.linear(torch.ones(18, weight.shape[1], dtype=BF16), packed, invariant=False)
    assert launches.num_addresses > 10_000


@pytest.mark.parametrize(
    ("weight", "dtype"),
    [
        (quantize_grouped(random_weight(64, 96), 8), BF16),
        (quantize_grouped(random_weight(64, 96), 32, bits=8), BF16),
        (quantize_scaled(random_weight(64, 96), (32, 48)), BF16),
        (quantize_scaled(random_weight(64, 96), (999, 999)), torch.float32),
    ],
    ids=["groups of 8", "8 bits", "narrow blocks", "fp32"],
)
def test_what_the_kernels_do_not_take_is_dequantized(weight: QuantizedWeight, dtype: torch.dtype) -> None:
    packed = quantized_layout.pack(weight, None, dtype, CPU)
    assert isinstance(packed, TritonLinear)
    assert torch.equal(packed.weight, dequantize(weight).to(dtype))
