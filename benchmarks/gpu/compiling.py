"""Compiles what the device check launches, without a GPU: its own tables, over kernels that compile and do not run.

What tensors hold is garbage, so whatever a step would look at is made harmless. Needs Triton with its NVIDIA tools.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.attention import decode_table, prefill_table
from benchmarks.gpu.bench import COMPILED, Bench
from benchmarks.gpu.kernel_cases import cases
from benchmarks.gpu.model_steps import step_table
from benchmarks.gpu.sampling import sampling_table
from kernels.api import AttentionPlan, KVCache, PackedLinear, RaggedBatch, Samples, SamplingBatch
from kernels.cuda.block_copies import SOURCE
from kernels.cuda.compiler import CudaUnavailable, compile_cubin
from kernels.triton import TritonBackend
from kernels.triton.layer import DeviceShape
from kernels.triton.linear import TritonLinear
from tests.fakes.eager_device import EagerDevice
from tools.dry_compile import Report, dry_run

CAPABILITIES = (80, 90)
_FIRST_WITH_FP8 = 89
_MULTIPROCESSORS = 132


class CompilingBackend(TritonBackend):
    """Launches are compiled. No token, no fault and no product of cuBLAS comes of them."""

    def plan_attention(self, batch: RaggedBatch, cache: KVCache) -> AttentionPlan:
        plan: Any = super().plan_attention(batch, cache)
        plan.faults.zero_()
        return plan  # type: ignore[no-any-return]

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        if isinstance(packed, TritonLinear) and not self.info.batch_invariant:
            return torch.zeros(x.shape[0], packed.out_features, dtype=x.dtype)
        return super().linear(x, packed)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Samples:
        samples = super().sample(logits, batch)
        return Samples(torch.zeros_like(samples.token_ids), torch.ones_like(samples.finite), samples.logprobs)


def compile_all(say: Callable[[str], None]) -> list[dict[str, object]]:
    """What came of it, architecture by architecture; each is a process's, which `say` goes to."""
    with ProcessPoolExecutor(len(CAPABILITIES), multiprocessing.get_context("spawn")) as processes:
        return list(processes.map(compile_for, CAPABILITIES, repeat(say)))


def compile_for(capability: int, say: Callable[[str], None]) -> dict[str, object]:
    """For one architecture, such as 90."""
    has_fp8 = capability >= _FIRST_WITH_FP8
    place, shape = torch.device("cpu"), DeviceShape(capability, _MULTIPROCESSORS)
    backend, invariant = (CompilingBackend(place, is_invariant, shape=shape) for is_invariant in (False, True))
    bench = Bench(EagerDevice(), backend, invariant, COMPILED, math.inf, lambda line: None)
    with dry_run(capability, is_fresh=True) as compiled:
        for case in cases(has_fp8):
            case.run(backend, bench.place)
        step_table(bench, 1.0, has_fp8)
        sampling_table(bench)
        decode_table(bench, 1.0, has_fp8)
        prefill_table(bench, 1.0)
    reports = [Report(kernel) for kernel in compiled]
    spilling = sorted({report.name for report in reports if report.spills})
    say(f"sm_{capability}: {len(reports)} kernels compiled; with spilled registers: {spilling or 'none'}")
    try:
        compile_cubin(SOURCE, capability)
        copies = "compiled"
    except CudaUnavailable as error:
        copies = str(error)
    say(f"sm_{capability}: block copies in CUDA C++: {copies}")
    names = sorted({report.name for report in reports})
    return {
        "kind": "compiled",
        "architecture": capability,
        "kernels": len(reports),
        "names": names,
        "spilling": spilling,
        "block_copies": copies,
    }
