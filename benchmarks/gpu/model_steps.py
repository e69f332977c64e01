"""Decode steps of a model with random weights through the worker's own runner: steps a second, share of the roofline.

Weights are made on the device, so that no file travels. Rows are admitted as if their context had been computed; what
the cache holds changes no time. Steps are launched two deep, as an engine does. Knows the worker; serves nobody.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from kernels.api import KVCacheSpec
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


@dataclass(frozen=True)
class Variant:
    """One way of running the steps."""

    has_graphs: bool
    kv_dtype: torch.dtype
    block_size: int

    def __str__(self) -> str:
        kept = "fp8" if self.kv_dtype.itemsize == 1 else "bf16"
        return f"{'graphs' if self.has_graphs else 'eager'}, {kept} KV, blocks of {self.block_size}"


def variants(has_fp8: bool) -> Iterator[Variant]:
    yield Variant(True, torch.bfloat16, 16)
    yield Variant(False, torch.bfloat16, 16)
    if has_fp8:
        yield Variant(True, torch.float8_e4m3fn, 16)
    yield Variant(True, torch.bfloat16, 32)


@dataclass(frozen=True)
class RandomWeights:
    """Every weight drawn on the device when it is taken, bf16; norms of ones."""

    expected: Mapping[str, ExpectedTensor]
    place: torch.device

    def take(self, name: str) -> Tensor:
        shape = self.expected[name].shape
        weight = torch.empty(shape, dtype=torch.bfloat16, device=self.place)
        return weight.fill_(1.0) if len(shape) == 1 else weight.normal_(std=shape[-1] ** -0.5)

    take_matrix = take


def random_decoder(bench: Bench) -> Decoder:
    """The model of the bench's sizes, bf16, every weight drawn on the device as it is packed."""
    config = parse_config(bench.sizes.model)
    shard = shard_model(config, 0, 1)
    source = RandomWeights(shard.expected(), bench.place)
    longest = bench.sizes.context + bench.sizes.num_steps + WARM_UP_STEPS + 2
    return build_decoder(shard, ALONE.group, source, bench.backend, min(longest, config.max_positions), bench.place)


def step_table(bench: Bench, copy_bytes_per_s: float, has_fp8: bool) -> None:
    """Steps a second at each batch, for each variant, and the share of what reading weights and KV would allow."""
    if not bench.has_time(20.0, "steps of the model"):
        return
    decoder = random_decoder(bench)
    config, sizes = decoder.config, bench.sizes
    for variant in variants(has_fp8):
        for num_rows in sizes.batches:
            what = f"{num_rows} rows, {variant}"
            if not bench.has_time(6.0, what):
                return
            kv_bytes = num_rows * sizes.context * _kv_bytes(config, variant)
            if 1.3 * kv_bytes > bench.free_bytes():
                bench.note("left out", f"{what}: the KV cache does not fit", what=what)
                continue
            seconds = seconds_of_step(bench, decoder, variant, num_rows)
            floor = (_weight_bytes(config) + kv_bytes) / copy_bytes_per_s
            rates = f"{1 / seconds:8.1f} steps/s {num_rows / seconds:9.0f} tok/s"
            line = f"{what:<42} {rates} {floor / seconds:6.1%} of the roofline"
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


def _weight_bytes(config: ModelConfig) -> int:
    """Matrices that every step reads: all but the embedding."""
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    layer = config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)
    return 2 * (config.num_layers * layer + config.hidden_size * config.num_embedding_rows)
