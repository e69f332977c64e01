"""What the compiler makes of sampling and of products with quantized weights: nothing spilled, and the wide loads."""

from __future__ import annotations

import pytest
import torch
from kernel_samples import RowParameters, sampling_batch

from kernels.quantized import QuantizedWeight
from kernels.reference.quantized import quantize_grouped, quantize_scaled
from kernels.triton import TritonBackend
from kernels.triton.layer import DeviceShape
from kernels.triton.sampling_logprobs import MAX_ALTERNATIVES
from tools.dry_compile import SHARED_MEMORY, Report, dry_run

VOCAB = 128_256


def backend(capability: int, invariant: bool = False) -> TritonBackend:
    return TritonBackend(torch.device("cpu"), invariant, shape=DeviceShape(capability, 132))


def assert_no_spills(reports: list[Report], capability: int) -> None:
    for report in reports:
        assert report.spills == 0, f"{report.name} spills: {report.registers} registers"
        assert report.shared_bytes <= SHARED_MEMORY[capability]


def sampling_reports(capability: int, dtype: torch.dtype) -> list[Report]:
    row = RowParameters(1.0, top_k=5, prompt=(1,), output=(2,), bias={3: 1.0}, forbidden=(4,))
    batch = sampling_batch([row] * 4, VOCAB, logprob_rows=[0, 1], num_top=5)
    with dry_run(capability) as compiled:
        backend(capability).sample(torch.zeros(4, VOCAB, dtype=dtype), batch)
    return [Report(kernel) for kernel in compiled]


def test_sampling_does_not_spill() -> None:
    reports = sampling_reports(90, torch.bfloat16)
    assert [report.name for report in reports] == [
        "_adjust", "_forbid", "scan_parts", "draw_truncated", "choose_of_parts", "_scan_logprobs", "_join_logprobs",
    ]  # fmt: skip
    assert_no_spills(reports, 90)
    scan = reports[2]
    assert scan.count(r"LDG\.E\.128") >= 1


@pytest.mark.parametrize("vocab", [VOCAB, 262_144])
def test_the_most_alternatives_do_not_spill(vocab: int) -> None:
    with dry_run(90) as compiled:
        backend(90).logprobs(torch.zeros(2, vocab), torch.zeros(2, dtype=torch.int64), MAX_ALTERNATIVES, vocab)
    reports = [Report(kernel) for kernel in compiled]
    assert "_join_logprobs" in {report.name for report in reports}
    assert_no_spills(reports, 90)


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "dtype"), [(80, torch.bfloat16), (90, torch.float32), (90, torch.float16)])
def test_sampling_does_not_spill_elsewhere(capability: int, dtype: torch.dtype) -> None:
    assert_no_spills(sampling_reports(capability, dtype), capability)


WEIGHTS: dict[str, QuantizedWeight] = {
    "fp8 tensor": quantize_scaled(torch.ones(256, 512), (256, 512)),
    "fp8 block": quantize_scaled(torch.ones(256, 512), (128, 128)),
    "int4": quantize_grouped(torch.ones(256, 512), 128),
}


def assert_products_stream(capability: int, dtype: torch.dtype, name: str, rows: tuple[int, ...]) -> None:
    ours = backend(capability)
    packed = ours.pack_quantized(WEIGHTS[name], None, dtype)
    with dry_run(capability) as compiled:
        for count in rows:
            ours.linear(torch.zeros(count, 512, dtype=dtype), packed)
    reports = [Report(kernel) for kernel in compiled]
    assert reports
    assert_no_spills(reports, capability)
    for report in reports:
        assert report.count("HGMMA|HMMA") > 0
        assert report.count(r"LDGSTS\.E\.BYPASS(\.LTC128B)?\.128") >= 2, "weights are fetched ahead, 16 bytes at a time"


@pytest.mark.parametrize("name", ["fp8 block", "int4"])
def test_quantized_products_stream_their_weights(name: str) -> None:
    assert_products_stream(90, torch.bfloat16, name, (1, 64))


@pytest.mark.slow
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("capability", [80, 90])
def test_quantized_products_stream_everywhere(capability: int, dtype: torch.dtype, name: str) -> None:
    assert_products_stream(capability, dtype, name, (1, 17, 64))
