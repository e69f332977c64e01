"""The scheduler's core over a real worker's runner, in one thread and without sockets: plans are executed as they come.

Knows core and runner, and the messages between them. What the benchmarks of preemption time, and what tests compare
answers on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.internal.v1 import types_pb2
from scheduler_svc import wire
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.statistics import ReplicaStatistics
from scheduler_svc.core.types import Ended, Event, Finished, ReplicaSpec, Request
from worker_svc.messages import step_result, token_batches
from worker_svc.runner import Runner


@dataclass
class Story:
    """What came of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of the same tokens, where they were asked for."""
    is_over: bool = False


class CoreOnRunner:
    """A scheduler with one replica."""

    def __init__(self, runner: Runner, limits: CoreLimits, num_host_blocks: int = 0) -> None:
        """Takes the runner for itself. `num_host_blocks`: as many as its host cache has, or fewer."""
        runner.reset()
        rows = runner.limits.rows
        self._runner = runner
        self.core = Scheduler(limits)
        spec = ReplicaSpec(
            replica_id=1,
            name="worker",
            incarnation=1,
            model="model",
            fingerprint="weights",
            max_model_len=rows.max_model_len,
            block_size=rows.block_size,
            num_device_blocks=rows.num_blocks,
            num_slots=rows.num_slots,
            max_step_tokens=runner.limits.max_step_tokens,
            num_host_blocks=num_host_blocks,
        )
        self.core.attach(spec, 0)
        self.stories: dict[int, Story] = {}
        self.busy_ns = 0
        """Time that steps took."""

    def submit(self, key: int, prompt: Sequence[int], sampling: types_pb2.SamplingParams, priority: int = 0) -> None:
        """One more request."""
        self.stories[key] = Story()
        request = Request(
            sequence_id=key,
            model="model",
            prompt_token_ids=prompt,
            max_tokens=sampling.max_tokens,
            sampling=sampling,
            priority=priority,
            router_id=1,
            stream_key=key,
        )
        self._take(self.core.submit(request, time.monotonic_ns()))

    def step(self) -> bool:
        """One plan, executed and answered; False if there is none."""
        planned = self.core.plan(1, time.monotonic_ns())
        self._take(planned.events)
        if planned.plan is None:
            return False
        self._execute(planned.plan)
        return True

    def run(self) -> None:
        """Until nothing is left. Raises RuntimeError if something is that cannot run."""
        while self.step():
            pass
        if self.core.sequences:
            raise RuntimeError(f"{len(self.core.sequences)} requests are left, and nothing runs")

    @property
    def statistics(self) -> ReplicaStatistics:
        """The replica's."""
        return self.core.statistics().replicas[0]

    def _execute(self, plan: StepPlan) -> None:
        message = wire.plan_to_wire(plan)
        begun = time.perf_counter_ns()
        outcome = self._runner.run(message)
        took = time.perf_counter_ns() - begun
        self.busy_ns += took
        for batches in token_batches(outcome).values():
            for batch in batches:
                index = 0
                for key, num in zip(batch.message.stream_keys, batch.message.num_tokens, strict=True):
                    self.stories[key].token_ids.extend(batch.message.token_ids[index : index + num])
                    index += num
                for logprobs in batch.message.logprobs:
                    self.stories[batch.message.stream_keys[logprobs.index]].logprobs.extend(logprobs.sampled)
        result = wire.result_from_wire(step_result(outcome, 1, (), took))
        self._take(self.core.complete(1, result, time.monotonic_ns()))

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Finished | Ended):
                self.stories[event.sequence_id].is_over = True
