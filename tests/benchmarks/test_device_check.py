"""The GPU's device check without a GPU: its own logic at toy sizes; a wrong kernel is found, and time is kept."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.device_check import PARTS, measure, toy_bench
from tests.fakes.eager_device import EagerDevice, PaddedReference


class WrongNorm(PaddedReference):
    """Its RMS norm forgets the weight."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return super().rms_norm(x, torch.ones_like(weight), eps)


def test_every_part_leaves_figures() -> None:
    bench = replace(toy_bench(600.0), say=lambda line: None)
    assert measure(bench, PARTS, has_fp8=True)
    kinds = [figure["kind"] for figure in bench.figures]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "kernel": 16,
        "ceilings": 1,
        "step": 14,
        "sampling": 3,
        "decode": 4,
        "prefill": 2,
        "prefill peer": 1,
    }
    assert isinstance(bench.device, EagerDevice)
    # Six of seven variants have a graph for each of two batches.
    assert bench.device.num_graphs == 12
    # The kernels' cases, and four matrices of each of two layers in both kinds.
    assert isinstance(bench.backend, PaddedReference)
    kinds_packed = [type(weight).__name__ for weight in bench.backend.quantized]
    assert (kinds_packed.count("ScaledWeight"), kinds_packed.count("GroupedWeight")) == (2 + 8, 2 + 8)
    assert all(figure["step_s"] > 0 for figure in bench.figures if figure["kind"] == "step")


def test_a_wrong_kernel_is_found() -> None:
    bench = replace(toy_bench(600.0), backend=WrongNorm(), say=lambda line: None)
    assert not measure(bench, ["kernels"], has_fp8=False)
    wrong = [figure["name"] for figure in bench.figures if figure["kind"] == "kernel" and not figure["is_right"]]
    assert wrong == ["dense torch.bfloat16", "dense torch.float16"]


def test_what_there_is_no_time_for_is_named() -> None:
    lines: list[str] = []
    bench = replace(toy_bench(0.0), say=lines.append)
    measure(bench, PARTS, has_fp8=True)
    left_out = [figure["what"] for figure in bench.figures if figure["kind"] == "left out"]
    assert left_out == [
        "kernels: attention torch.bfloat16",
        "steps of the model in bf16",
        "sampling 64 rows of 256, greedy",
        "decode 1 x 40 torch.bfloat16",
        "prefill 24 over 0",
    ]
    assert "left out for want of time: steps of the model in bf16" in lines
