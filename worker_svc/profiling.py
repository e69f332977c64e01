"""What a step takes of a card, measured before the KV cache is sized: the largest step there can be, and the graphs.

Runs a runner over a scratch cache of a few blocks, with rows that share them: what it computes is garbage, what it
takes is not. Knows the runner and a meter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kernels.api import KVCacheSpec
from octavo.internal.v1 import types_pb2, worker_pb2
from worker_svc.device.memory import Meter
from worker_svc.runner import Runner, RunnerLimits, RunnerParts

# Graphs beyond the first fit into its memory but for what CUDA keeps for each: so many are measured.
_MEASURED_GRAPHS = 3


@dataclass(frozen=True)
class StepMemory:
    """Bytes that a step's tensors take at most, and that all graphs keep."""

    workspace_bytes: int
    graph_bytes: int


def measure_steps(
    meter: Meter, make_parts: Callable[[KVCacheSpec], RunnerParts], spec: KVCacheSpec, limits: RunnerLimits
) -> StepMemory:
    """`make_parts` gives the rank's parts over a cache of that shape; `spec` says all but the number of blocks.

    Raises torch.OutOfMemoryError where not even that fits.
    """
    tokens_each = max(1, limits.max_step_tokens // limits.rows.num_slots)
    tokens_each = min(tokens_each, limits.rows.max_model_len - 1)
    num_blocks = -(-tokens_each // limits.rows.block_size)
    limits = replace(limits, rows=replace(limits.rows, num_blocks=num_blocks))
    parts = make_parts(replace(spec, num_blocks=num_blocks))
    runner = Runner(replace(parts, graph_rows=()), limits)
    plan = _largest_step(limits, tokens_each, num_blocks)

    def step() -> None:
        runner.run(plan)
        runner.reset()

    step()  # kernels are compiled, libraries make their workspaces
    workspace = meter.peak_bytes(step)
    return StepMemory(workspace, _graph_bytes(meter, parts, limits))


def _graph_bytes(meter: Meter, parts: RunnerParts, limits: RunnerLimits) -> int:
    """Of all graphs, from those of the largest batches."""
    sizes = parts.graph_rows
    if not sizes:
        return 0

    def captured(some: tuple[int, ...]) -> Callable[[], Runner]:
        def capture() -> Runner:
            runner = Runner(replace(parts, graph_rows=some), limits)
            runner.capture_graphs()
            return runner

        return capture

    first = meter.kept_bytes(captured(sizes[-1:]))
    if len(sizes) == 1:
        return first
    some = sizes[-_MEASURED_GRAPHS:]
    each = (meter.kept_bytes(captured(some)) - first) / (len(some) - 1)
    return first + int(max(0.0, each) * (len(sizes) - 1))


def _largest_step(limits: RunnerLimits, tokens_each: int, num_blocks: int) -> worker_pb2.StepPlan:
    """Every slot admitted and run, with what sampling does at its most.

    The first row's context is the longest there can be: partial results of attention are sized by it.
    """
    sampling = types_pb2.SamplingParams(
        temperature=1.0, top_k=50, top_p=0.9, repetition_penalty=1.1, max_tokens=1, seed=1, num_logprobs=1
    )
    rows, block_size = range(limits.rows.num_slots), limits.rows.block_size
    longest = (limits.rows.max_model_len - 1 - tokens_each) // block_size * block_size
    starts = [longest, *[0] * (len(rows) - 1)]
    return worker_pb2.StepPlan(
        step=1,
        admissions=[
            worker_pb2.Admission(
                slot=slot,
                token_ids=[0] * (start + tokens_each),
                num_prompt_tokens=start + tokens_each,
                num_computed_tokens=start,
                block_ids=[place % num_blocks for place in range(-(-(start + tokens_each) // block_size))],
                sampling=sampling,
            )
            for slot, start in zip(rows, starts, strict=True)
        ],
        row_slots=rows,
        row_starts=starts,
        row_counts=[tokens_each] * len(rows),
    )
