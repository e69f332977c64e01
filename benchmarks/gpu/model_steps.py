"""Decode steps of a model with random weights through the worker's own runner: steps a second, share of the roofline.

Weights are made on the device, so that no file travels. Rows are admitted as if their context had been computed; what
the cache holds changes no time. Steps are launched two deep, as an engine does. Knows the worker; serves nobody.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.gpu import aims
from benchmarks.gpu.bench import Bench
from kernels.api import Backend, KVCacheSpec
from kernels.quantized import GroupedWeight, QuantizedWeight, ScaledWeight
from octavo.internal.v1 import types_pb2, worker_pb2
from worker_svc.device.api import Device
from worker_svc.model.build import build_decoder
from worker_svc.model.config import ModelConfig
from worker_svc.model.decoder import Decoder
from worker_svc.model.families import parse_config
from worker_svc.model.sharding import shard_model
from worker_svc.parallel.group import ALONE
from worker_svc.rows import RowLimits
from worker_svc.runner import Runner, RunnerLimits, RunnerParts, StepInFlight
from worker_svc.weights import ExpectedTensor

WARM_UP_STEPS = 3
_GROUP = 128
# Bytes of a weight of the layers' matrices, with its share of a scale.
_ITEM_BYTES = {"bf16": 2.0, "fp8": 1.0, "int4": 0.5 + 5 / _GROUP}


@dataclass(frozen=True)
class Variant:
    """One way of running the steps. `weights` says what the layers' matrices are: bf16, fp8 or int4."""

    has_graphs: bool
    kv_dtype: torch.dtype
    block_size: int
    weights: str = "bf16"
    is_invariant: bool = False

    def __str__(self) -> str:
        kept = "fp8" if self.kv_dtype.itemsize == 1 else "bf16"
        how = "graphs" if self.has_graphs else "eager"
        mode = ", invariant" if self.is_invariant else ""
        return f"{how}, {self.weights}, {kept} KV, blocks of {self.block_size}{mode}"


def variants(has_fp8: bool) -> Iterator[Variant]:
    """Those that share a decoder follow each other."""
    yield Variant(True, torch.bfloat16, 16)
    yield Variant(False, torch.bfloat16, 16)
    if has_fp8:
        yield Variant(True, torch.float8_e4m3fn, 16)
    yield Variant(True, torch.bfloat16, 32)
    yield Variant(True, torch.bfloat16, 16, is_invariant=True)
    # The kernels need no fp8 of the card.
    for weights in ("int4", "fp8"):
        yield Variant(True, torch.bfloat16, 16, weights)


@dataclass(frozen=True)
class RandomWeights:
    """Every weight drawn on the device when it is taken; norms of ones. The layers' matrices are of a kind."""

    expected: Mapping[str, ExpectedTensor]
    bench: Bench
    kind: str

    def take(self, name: str) -> Tensor:
        shape, place = self.expected[name].shape, self.bench.place
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=place)
        memory = torch.empty(shape, dtype=torch.bfloat16, device=place)
        return memory.normal_(std=shape[-1] ** -0.5) if self.bench.sizes.has_random_weights else memory

    def take_matrix(self, name: str) -> Tensor | QuantizedWeight:
        if self.kind == "bf16":
            return self.take(name)
        rows, columns = self.expected[name].shape
        place, scale = self.bench.place, columns**-0.5
        if self.kind == "fp8":
            # The sign, an exponent of one to four, and the mantissa.
            numbers = self._drawn(rows, columns, 256) & 0x9F | 0x20
            scales = torch.full((rows, 1), scale, device=place)
            return ScaledWeight(numbers.view(torch.float8_e4m3fn), scales, (1, columns))
        group = min(_GROUP, columns)
        scales = torch.full((rows, -(-columns // group)), scale / 4, device=place)
        zeros = torch.full(scales.shape, 8, dtype=torch.uint8, device=place)
        return GroupedWeight(self._drawn(rows, columns, 16), scales, zeros, torch.arange(columns) // group, 4)

    def _drawn(self, rows: int, columns: int, limit: int) -> Tensor:
        """Bytes below a limit."""
        memory = torch.zeros((rows, columns), dtype=torch.uint8, device=self.bench.place)
        return memory.random_(limit) if self.bench.sizes.has_random_weights else memory


def random_decoder(bench: Bench, backend: Backend, kind: str) -> Decoder:
    """The model of the bench's sizes, every weight drawn on the device as it is packed."""
    config = parse_config(bench.sizes.model)
    shard = shard_model(config, 0, 1)
    source = RandomWeights(shard.expected(), bench, kind)
    longest = bench.sizes.context + bench.sizes.num_steps + WARM_UP_STEPS + 2
    return build_decoder(shard, ALONE.group, source, backend, min(longest, config.max_positions), bench.place)


def step_table(bench: Bench, copy_bytes_per_s: float, has_fp8: bool) -> None:
    """Steps a second at each batch, for each variant, and the share of what reading weights and KV would allow."""
    alike = itertools.groupby(variants(has_fp8), lambda variant: (variant.weights, variant.is_invariant))
    for (kind, is_invariant), some in alike:
        if not bench.has_time(20.0, f"steps of the model in {kind}{', invariant' if is_invariant else ''}"):
            return
        backend = bench.invariant if is_invariant else bench.backend
        decoder = random_decoder(bench, backend, kind)
        for variant in some:
            _steps_of_variant(replace(bench, backend=backend), decoder, variant, copy_bytes_per_s)
        del decoder


def _steps_of_variant(bench: Bench, decoder: Decoder, variant: Variant, copy_bytes_per_s: float) -> None:
    config, sizes = decoder.config, bench.sizes
    for num_rows in sizes.batches:
        what = f"{num_rows} rows, {variant}"
        if not bench.has_time(6.0, what):
            return
        kv_bytes = num_rows * sizes.context * _kv_bytes(config, variant)
        if 1.3 * kv_bytes > bench.free_bytes():
            bench.note("left out", f"{what}: the KV cache does not fit", what=what)
            continue
        seconds = seconds_of_step(bench, decoder, variant, num_rows)
        floor = (_weight_bytes(config, variant.weights) + kv_bytes) / copy_bytes_per_s
        rates = f"{1 / seconds:8.1f} steps/s {num_rows / seconds:9.0f} tok/s"
        aim = ""
        if variant == next(variants(has_fp8=False)):
            of_one = aims.beside(aims.STEP_MS_OF_ONE_ROW, "ms")
            aim = of_one if num_rows == 1 else aims.beside(aims.STEP_SHARE, "%")
        line = f"{what:<48} {1e3 * seconds:7.2f} ms {rates} {floor / seconds:6.1%} of the roofline{aim}"
        bench.note("step", line, rows=num_rows, variant=str(variant), step_s=seconds, roofline_s=floor)


def seconds_of_step(bench: Bench, decoder: Decoder, variant: Variant, num_rows: int) -> float:
    """The mean over the bench's steps, host work between them included."""
    runner = make_runner(bench.device, bench, decoder, variant, num_rows)
    plans = list(decode_plans(num_rows, bench.sizes.context, bench.sizes.num_steps + WARM_UP_STEPS, variant.block_size))
    run_two_deep(runner, plans[:WARM_UP_STEPS])
    begun = time.perf_counter()
    run_two_deep(runner, plans[WARM_UP_STEPS:])
    return (time.perf_counter() - begun) / (len(plans) - WARM_UP_STEPS)


def make_runner(device: Device, bench: Bench, decoder: Decoder, variant: Variant, num_rows: int) -> Runner:
    """A runner for so many rows, and a graph of as many."""
    config, sizes = decoder.config, bench.sizes
    longest = sizes.context + sizes.num_steps + WARM_UP_STEPS + 1
    blocks_each = -(-longest // variant.block_size)
    spec = KVCacheSpec(
        config.num_layers,
        num_rows * blocks_each,
        variant.block_size,
        config.num_kv_heads,
        config.head_dim,
        variant.kv_dtype,
    )
    rows = RowLimits(num_rows, longest, variant.block_size, spec.num_blocks, config.num_embedding_rows)
    graph_rows = (num_rows,) if variant.has_graphs else ()
    parts = RunnerParts(
        decoder, bench.backend, bench.backend.allocate_kv_cache(spec), device=device, graph_rows=graph_rows
    )
    runner = Runner(parts, RunnerLimits(rows, max(num_rows, 1)))
    runner.capture_graphs()
    return runner


def decode_plans(num_rows: int, context: int, num_steps: int, block_size: int) -> Iterator[worker_pb2.StepPlan]:
    """Plans of one token for each row, the first of which admits them with `context` tokens computed."""
    blocks_each = -(-(context + num_steps + 1) // block_size)
    sampling = types_pb2.SamplingParams(
        temperature=1.0, seed=1, top_p=1, repetition_penalty=1, max_tokens=num_steps + 1
    )
    rows = range(num_rows)
    admissions = [
        worker_pb2.Admission(
            slot=slot,
            token_ids=[1] * (context + 1),
            num_prompt_tokens=context + 1,
            num_computed_tokens=context,
            block_ids=range(slot * blocks_each, (slot + 1) * blocks_each),
            sampling=sampling,
        )
        for slot in rows
    ]
    for step in range(num_steps):
        yield worker_pb2.StepPlan(
            step=step + 1,
            admissions=admissions if step == 0 else [],
            row_slots=rows,
            row_starts=[context + step] * num_rows,
            row_counts=[1] * num_rows,
        )


def run_two_deep(runner: Runner, plans: list[worker_pb2.StepPlan]) -> None:
    """Launches each plan before the one before it is settled; settles all."""
    flights: deque[StepInFlight] = deque()
    for plan in plans:
        flights.append(runner.launch(plan))
        if len(flights) == 2:
            flights.popleft().result()
    while flights:
        flights.popleft().result()


def _kv_bytes(config: ModelConfig, variant: Variant) -> int:
    """Of one token."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * variant.kv_dtype.itemsize


def _weight_bytes(config: ModelConfig, kind: str) -> float:
    """Matrices that every step reads: all but the embedding."""
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    layer = config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)
    return config.num_layers * layer * _ITEM_BYTES[kind] + 2 * config.hidden_size * config.num_embedding_rows
