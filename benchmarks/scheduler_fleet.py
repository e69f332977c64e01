"""A fleet of simulated replicas around the scheduler core, in virtual time: what the scheduler benchmarks drive.

Knows the core and a cost model; nothing here is measured. A replica runs one plan after the other, each taking
`step_ns + token_ns * tokens + copy_ns * copies`, while the next one is planned: two plans deep, as real ones are.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from scheduler_svc.core.plan import StepPlan, StepResult
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import Event, Finished, FinishReason, ReplicaSpec, Request, Scheduled


@dataclass(frozen=True)
class Costs:
    """Time of a step. The defaults are near those of a small model on two cores."""

    step_ns: int = 7_000_000
    token_ns: int = 330_000
    copy_ns: int = 40_000

    def of(self, plan: StepPlan) -> int:
        """Time that a plan takes."""
        num_copies = len(plan.demote_host_ids) + len(plan.promote_host_ids)
        return self.step_ns + self.token_ns * sum(plan.row_counts) + self.copy_ns * num_copies


class Worker:
    """Executes plans without memory: knows of each slot how many tokens are known, and how many may be sampled.

    The sampled token is made up from the slot's length, so that outputs differ from one another.
    """

    def __init__(self, spec: ReplicaSpec, costs: Costs) -> None:
        self.spec = spec
        self.costs = costs
        self.inbox: deque[StepPlan] = deque()
        self.is_busy = False
        self._known: dict[int, int] = {}
        self._end: dict[int, int] = {}

    def run(self) -> StepResult:
        """Executes the oldest plan."""
        plan = self.inbox.popleft()
        for slot in plan.released_slots:
            del self._known[slot], self._end[slot]
        for admission in plan.admissions:
            self._known[admission.slot] = len(admission.token_ids)
            self._end[admission.slot] = admission.num_prompt_tokens + int(admission.sampling)  # type: ignore[call-overload]
        num_sampled, token_ids, finishes, known = [], [], {}, self._known
        for row, (slot, start, count) in enumerate(zip(plan.row_slots, plan.row_starts, plan.row_counts, strict=True)):
            samples = start + count == known[slot] and known[slot] < self._end[slot]
            num_sampled.append(int(samples))
            if samples:
                token_ids.append(known[slot] * 7919 % 50_000 + 1)
                known[slot] += 1
                if known[slot] == self._end[slot]:
                    finishes[row] = FinishReason.LENGTH
        num_copies = len(plan.demote_host_ids) + len(plan.promote_host_ids)
        return StepResult(
            plan.incarnation,
            plan.step,
            num_sampled,
            token_ids,
            finishes,
            (),
            self.costs.of(plan),
            num_copies * self.costs.copy_ns,
        )


@dataclass
class Life:
    """One request's times."""

    submitted_ns: int
    first_token_ns: int | None = None
    cached_tokens: int = 0


@dataclass
class Fleet:
    """Core, workers and virtual time. `on_finish` may submit the next request."""

    core: Scheduler
    on_finish: Callable[[int], None] = lambda sequence_id: None
    now: int = 0
    workers: dict[int, Worker] = field(default_factory=dict)
    lives: dict[int, Life] = field(default_factory=dict)
    num_output_tokens: int = 0
    idle_ns_while_waiting: int = 0
    trace: list[tuple[object, ...]] | None = None
    """If a list: every plan's rows, to compare schedules."""
    _ready: list[tuple[int, int]] = field(default_factory=list)  # (time, replica id) at which a step is done

    def attach(self, spec: ReplicaSpec, costs: Costs) -> None:
        """One more replica."""
        self.core.attach(spec, self.now)
        self.workers[spec.replica_id] = Worker(spec, costs)

    def submit(self, request: Request) -> None:
        """One more request; its sampling is max_tokens."""
        self.lives[request.sequence_id] = Life(self.now)
        self._take(self.core.submit(request, self.now))

    def plan_all(self, replica_ids: Iterable[int] | None = None) -> None:
        """Fills pipelines."""
        for replica_id in list(self.workers if replica_ids is None else replica_ids):
            worker = self.workers[replica_id]
            while True:
                planned = self.core.plan(replica_id, self.now)
                self._take(planned.events)
                if planned.plan is None:
                    break
                worker.inbox.append(planned.plan)
                if self.trace is not None:
                    plan = planned.plan
                    self.trace.append(
                        (replica_id, tuple(plan.row_slots), tuple(plan.row_starts), tuple(plan.row_counts))
                    )
            self._start(worker)

    def step(self) -> bool:
        """The next step that is done; False if none runs."""
        if not self._ready:
            return False
        self.now, replica_id = heapq.heappop(self._ready)
        worker = self.workers[replica_id]
        worker.is_busy = False
        rows = self.core.replicas[replica_id].rows.unanswered[0].rows
        result = worker.run()
        self._start(worker)  # the next plan is there already
        self.num_output_tokens += len(result.token_ids)
        for row, num in enumerate(result.num_sampled):
            life = self.lives.get(rows[row].request.sequence_id)
            if num and life is not None and life.first_token_ns is None:
                life.first_token_ns = self.now
        self._take(self.core.complete(replica_id, result, self.now))
        self.plan_all([replica_id])
        return True

    def run(self) -> None:
        """Until nothing is left."""
        self.plan_all()
        while self.step() or self._unblocked():
            pass

    def _unblocked(self) -> bool:
        """Other replicas may have work that a step elsewhere set free."""
        self.plan_all()
        return bool(self._ready)

    def _start(self, worker: Worker) -> None:
        if worker.inbox and not worker.is_busy:
            worker.is_busy = True
            done_at = self.now + worker.costs.of(worker.inbox[0])
            heapq.heappush(self._ready, (done_at, worker.spec.replica_id))

    def _take(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Scheduled):
                self.lives[event.sequence_id].cached_tokens += event.cached_tokens
            elif isinstance(event, Finished):
                self.on_finish(event.sequence_id)


def replica_spec(replica_id: int = 1, **changes: int) -> ReplicaSpec:
    """A replica as the benchmarks use it: blocks of 16 tokens."""
    sizes = {
        "max_model_len": 65_536,
        "block_size": 16,
        "num_device_blocks": 100_000,
        "num_slots": 1024,
        "max_step_tokens": 2048,
        **changes,
    }
    return ReplicaSpec(replica_id, f"replica-{replica_id}", 1000 + replica_id, "model", "fingerprint", **sizes)


def request(sequence_id: int, prompt: Iterable[int], num_output_tokens: int, **fields: object) -> Request:
    """A request that ends after so many tokens."""
    return Request(
        sequence_id=sequence_id,
        model="model",
        prompt_token_ids=list(prompt),
        max_tokens=num_output_tokens,
        sampling=num_output_tokens,
        **fields,  # type: ignore[arg-type]
    )
