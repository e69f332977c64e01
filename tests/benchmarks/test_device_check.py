"""The GPU's device check without a GPU: its own logic at toy sizes; a wrong kernel is found, and time is kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.device_check import PARTS, _save, measure, toy_bench
from benchmarks.gpu import aims
from benchmarks.gpu.bench import FULL
from kernels.api import Samples, SamplingBatch
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


class FailingSampler(PaddedReference):
    """As on a device without the memory: neither its case nor its table can run."""

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Samples:
        raise torch.OutOfMemoryError("nothing left")


def test_what_fails_is_named_and_loses_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    bench = replace(toy_bench(600.0), backend=FailingSampler(), say=lambda line: None)
    saved: list[int] = []
    parts = ("kernels", "sampling", "attention")
    assert not measure(bench, parts, has_fp8=False, save=lambda: saved.append(len(bench.figures)))
    _save(bench, path, True, 0.0)
    figures = json.loads(path.read_text(encoding="utf-8"))["figures"]
    assert [figure["name"] for figure in figures if figure["kind"] == "kernel" and not figure["is_right"]] == [
        "sampling"
    ]
    assert [figure["part"] for figure in figures if figure["kind"] == "failed"] == ["sampling"]
    assert {"decode", "prefill"} <= {figure["kind"] for figure in figures}
    assert saved[0] == 15
    assert saved[-1] == len(figures)


def test_aims_stand_beside_what_was_measured() -> None:
    assert aims.beside(aims.DECODE_US[64, 4096], "us") == "  [H200: 298 us, stretch 275]"
    assert aims.beside(aims.STEP_SHARE, "%") == "  [H200: 70 %, stretch 80]"
    assert aims.beside(aims.SAMPLING_US["greedy"], "us") == "  [H200: 25 us]"
    assert set(FULL.decode) == set(aims.DECODE_US)
    assert set(FULL.prefill) == set(aims.PREFILL_TFLOPS)
