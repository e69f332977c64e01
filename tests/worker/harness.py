"""Drives a runner as a scheduler would, in the simplest way: admits, gives blocks, makes plans. No sockets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kernels.api import Backend, KVCacheSpec
from kernels.reference import ReferenceBackend
from octavo.internal.v1 import types_pb2, worker_pb2
from octavo.sources import ModelSource, resolve
from worker_svc.device.api import Device
from worker_svc.device.cpu import CPU
from worker_svc.grammar import GrammarCompiler
from worker_svc.messages import step_result
from worker_svc.model.build import build_decoder
from worker_svc.model.config import ModelConfig
from worker_svc.model.families import parse_config
from worker_svc.model.sharding import shard_model
from worker_svc.outcome import StepOutcome, TokenLogprobs
from worker_svc.parallel.group import ALONE, TPGroup
from worker_svc.rows import RowLimits
from worker_svc.runner import Runner, RunnerLimits, RunnerParts
from worker_svc.weights import Weights, open_checkpoint


@dataclass(frozen=True)
class RunnerShape:
    """Limits of a runner under test."""

    num_slots: int = 8
    num_blocks: int = 128
    block_size: int = 4
    max_model_len: int = 256
    max_step_tokens: int = 512
    vocab_size: int | None = None
    num_host_blocks: int = 0
    device: Device = CPU
    graph_rows: tuple[int, ...] = ()


def build_runner(
    source: ModelSource | Path,
    shape: RunnerShape = RunnerShape(),
    dtype: torch.dtype = torch.float32,
    backend: Backend | None = None,
    group: TPGroup = ALONE.group,
    grammars: GrammarCompiler | None = None,
) -> Runner:
    """A rank's runner over a checkpoint, with the reference kernels unless others are given."""
    backend = backend or ReferenceBackend()
    if isinstance(source, Path):
        source = resolve(str(source))
    config = parse_config(json.loads((source.directory / "config.json").read_text()))
    shard = shard_model(config, group.rank, group.size)
    weights = Weights(shard.expected(), open_checkpoint(source, dtype), dtype)
    decoder = build_decoder(shard, group, weights, backend, shape.max_model_len)
    cache = backend.allocate_kv_cache(_cache_spec(shard.config, shape, shape.num_blocks, dtype))
    host = None
    if shape.num_host_blocks:
        host = backend.allocate_kv_cache(_cache_spec(shard.config, shape, shape.num_host_blocks, dtype))
    rows = RowLimits(
        num_slots=shape.num_slots,
        max_model_len=shape.max_model_len,
        block_size=shape.block_size,
        num_blocks=shape.num_blocks,
        vocab_size=shape.vocab_size or config.num_embedding_rows,
    )
    parts = RunnerParts(decoder, backend, cache, host, group, shape.device, shape.graph_rows)
    return Runner(parts, RunnerLimits(rows, shape.max_step_tokens), grammars)


def _cache_spec(config: ModelConfig, shape: RunnerShape, num_blocks: int, dtype: torch.dtype) -> KVCacheSpec:
    return KVCacheSpec(config.num_layers, num_blocks, shape.block_size, config.num_kv_heads, config.head_dim, dtype)


def sampling(**changes: object) -> types_pb2.SamplingParams:
    """Greedy parameters with everything off and 16 tokens, but for `changes`."""
    values: dict[str, object] = {"top_p": 1.0, "repetition_penalty": 1.0, "max_tokens": 16, **changes}
    return types_pb2.SamplingParams(**values)  # type: ignore[arg-type]


@dataclass
class Tracked:
    """What the driver knows of one sequence; a scheduler in miniature."""

    key: int
    tokens: list[int]
    num_prompt: int
    params: types_pb2.SamplingParams
    slot: int | None = None
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    # The first of its blocks are another sequence's.
    num_borrowed: int = 0
    # Nobody else gets its blocks when it ends: they stay filled, for `Driver.borrow`.
    keeps_blocks: bool = False
    finish: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: dict[int, tuple[float, tuple[int, ...], tuple[float, ...]]] = field(default_factory=dict)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


@dataclass(frozen=True)
class Answer:
    """Everything a client could see."""

    output: list[int]
    logprobs: list[tuple[list[float], list[int], list[float]]]
    prompt_logprobs: dict[int, tuple[float, tuple[int, ...], tuple[float, ...]]]


def answer(sequence: Tracked) -> Answer:
    """What the client of a sequence has seen so far."""
    found = [(f.tokens.tolist(), f.top_ids.ravel().tolist(), f.top.ravel().tolist()) for f in sequence.logprobs]
    return Answer(sequence.output, found, dict(sorted(sequence.prompt_logprobs.items())))


class Driver:
    """Runs sequences on one runner: each call of `step` is one plan."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.limits = runner.limits
        self.next_step = 1
        self.free_blocks = list(range(self.limits.rows.num_blocks))[::-1]
        self.free_slots = list(range(self.limits.rows.num_slots))[::-1]
        self.released: list[int] = []
        self.by_key: dict[int, Tracked] = {}

    def add(self, tokens: Sequence[int], params: types_pb2.SamplingParams | None = None) -> Tracked:
        """A sequence that waits; it enters a slot with its first chunk."""
        key = len(self.by_key) + 1
        self.by_key[key] = Tracked(key, list(tokens), len(tokens), params or sampling())
        return self.by_key[key]

    def resume(self, lost: Tracked) -> Tracked:
        """A sequence that another worker left unfinished; its output so far comes as prior tokens."""
        sequence = self.add(lost.tokens, lost.params)
        sequence.num_prompt, sequence.logprobs = lost.num_prompt, list(lost.logprobs)
        return sequence

    def borrow(self, sequence: Tracked, donor: Tracked, num_tokens: int) -> None:
        """Has a waiting sequence enter as on a prefix hit: with blocks that another one has filled and keeps."""
        assert sequence.slot is None
        assert donor.keeps_blocks
        assert num_tokens % self.limits.rows.block_size == 0
        assert sequence.tokens[:num_tokens] == donor.tokens[:num_tokens]
        sequence.num_computed, sequence.num_borrowed = num_tokens, num_tokens // self.limits.rows.block_size
        sequence.blocks = donor.blocks[: sequence.num_borrowed]

    def preempt(self, sequence: Tracked) -> None:
        """Takes the sequence off its slot; its next chunk admits it again from nothing."""
        self._release(sequence)
        sequence.num_computed = 0

    def swap(self, sequence: Tracked) -> None:
        """Takes the sequence off its slot, its full blocks to the host tier, and those back to blocks of other ids."""
        old = sequence.blocks[: sequence.num_computed // self.limits.rows.block_size]
        new = [self.free_blocks.pop() for _ in old]
        self._release(sequence)
        out = worker_pb2.StepPlan(step=self.next_step, demote_device_ids=old, demote_host_ids=range(len(old)))
        out.released_slots.extend(self.released)
        self.runner.run(out)
        back = worker_pb2.StepPlan(step=self.next_step + 1, promote_host_ids=range(len(old)), promote_device_ids=new)
        self.runner.run(back)
        self.next_step, self.released = self.next_step + 2, []
        sequence.blocks, sequence.num_computed = new, len(new) * self.limits.rows.block_size

    def step(self, chunks: Mapping[int, int]) -> StepOutcome:
        """Runs `chunks` (key -> tokens) as one plan, in the mapping's order, and takes its outcome in."""
        plan = worker_pb2.StepPlan(step=self.next_step, released_slots=self.released)
        self.next_step += 1
        self.released = []
        for key, count in chunks.items():
            self._plan_row(plan, self.by_key[key], count)
        outcome = self.runner.run(plan)
        self._take_in(list(chunks), outcome)
        return outcome

    def finish(self, *sequences: Tracked, chunk: int = 64) -> None:
        """Runs sequences to their ends, every unfinished one in every step, prompts in chunks."""
        while alive := [s for s in sequences if not s.finish]:
            self.step({s.key: min(chunk, len(s.tokens) - s.num_computed) for s in alive})

    def _plan_row(self, plan: worker_pb2.StepPlan, sequence: Tracked, count: int) -> None:
        needed = -(-(sequence.num_computed + count) // self.limits.rows.block_size) - len(sequence.blocks)
        new_blocks = [self.free_blocks.pop() for _ in range(needed)]
        sequence.blocks += new_blocks
        if sequence.slot is None:
            sequence.slot = self.free_slots.pop()
            plan.admissions.append(
                worker_pb2.Admission(
                    slot=sequence.slot,
                    token_ids=sequence.tokens,
                    num_prompt_tokens=sequence.num_prompt,
                    num_computed_tokens=sequence.num_computed,
                    block_ids=sequence.blocks,
                    sampling=sequence.params,
                    router_id=1,
                    stream_key=sequence.key,
                    attempt=1,
                )
            )
        elif new_blocks:
            plan.append_slots.append(sequence.slot)
            plan.append_counts.append(len(new_blocks))
            plan.append_block_ids.extend(new_blocks)
        plan.row_slots.append(sequence.slot)
        plan.row_starts.append(sequence.num_computed)
        plan.row_counts.append(count)
        sequence.num_computed += count

    def _release(self, sequence: Tracked) -> None:
        assert sequence.slot is not None
        self.released.append(sequence.slot)
        self.free_slots.append(sequence.slot)
        sequence.slot = None
        if not sequence.keeps_blocks:
            self.free_blocks += sequence.blocks[sequence.num_borrowed :]
            sequence.blocks, sequence.num_borrowed = [], 0

    def _take_in(self, keys: list[int], outcome: StepOutcome) -> None:
        result = step_result(outcome, 0, (), 0)
        token_ids = iter(result.token_ids)
        for key, num_sampled, reason in zip(keys, result.num_sampled, result.finish_reasons, strict=True):
            sequence = self.by_key[key]
            sequence.tokens += [next(token_ids) for _ in range(num_sampled)]
            if reason:
                sequence.finish = reason
                self._release(sequence)
        for group in outcome.sampled:
            for index, found in group.logprobs.items():
                self.by_key[group.addresses[index].stream_key].logprobs.append(found)
        for stretch in outcome.prompt_stretches:
            sequence = self.by_key[stretch.address.stream_key]
            for offset, logprob in enumerate(stretch.logprobs.tokens.tolist()):
                tops = tuple(stretch.logprobs.top_ids[offset].tolist()), tuple(stretch.logprobs.top[offset].tolist())
                sequence.prompt_logprobs[stretch.start + offset] = (logprob, *tops)


def greedy_alone(runner: Runner, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The greedy continuation of a prompt that has the runner to itself."""
    runner.reset()
    driver = Driver(runner)
    sequence = driver.add(prompt, sampling(max_tokens=max_tokens))
    driver.finish(sequence)
    runner.reset()
    return sequence.output
