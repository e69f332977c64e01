"""The real core over simulated replicas, in virtual time: what a workload would be like on machines that are described.

Knows the core and a cost model. Replicas run one step after the other and hold a second plan ready, as real ones do.
Deterministic: the same workload gives the same run.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from octavo.cost_model import CostModel
from scheduler_svc.core.plan import StepPlan, StepResult
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import (
    Ended,
    Event,
    Finished,
    FinishReason,
    Refused,
    ReplicaSpec,
    Request,
)
from scheduler_svc.measures import SequenceTimes
from scheduler_svc.recorder import Recorder

_TICK_NS = 1_000_000_000

TokenAt = Callable[[int, int], int]
"""The token of a sequence at a position, prompt included."""


@dataclass(frozen=True)
class Arrival:
    """A sequence that comes, and what it will do."""

    at_ns: int
    request: Request
    num_output_tokens: int
    """Output tokens, prior ones included, after which the model ends it; max_tokens may end it sooner."""
    cancel_at_ns: int | None = None


@dataclass(frozen=True)
class Stay:
    """A replica and when it is there."""

    spec: ReplicaSpec
    attach_at_ns: int = 0
    detach_at_ns: int | None = None


@dataclass
class Run:
    """What came out."""

    times: dict[int, SequenceTimes] = field(default_factory=dict)
    num_steps: int = 0
    busy_ns: int = 0
    """Time that replicas spent in steps, in all."""
    end_ns: int = 0
    first_refusal: str = ""
    """Why the first of those was refused that were; empty: none was."""
    is_complete: bool = True
    """Whether everything ended; else the workload grows without bound or nobody can serve it."""


@dataclass
class _Row:
    sequence_id: int
    num_tokens: int
    num_prompt_tokens: int
    has_ended: bool = False


@dataclass
class _Replica:
    spec: ReplicaSpec
    inbox: deque[StepPlan] = field(default_factory=deque)
    rows: dict[int, _Row] = field(default_factory=dict)
    is_running: bool = False


class Simulation:
    """One run. `core` may be a recorder around one."""

    def __init__(self, core: Scheduler | Recorder, costs: CostModel, token_at: TokenAt | None = None) -> None:
        self._core = core
        self._costs = costs
        self._token_at = token_at or _distinct_token
        self._replicas: dict[int, _Replica] = {}
        self._arrivals: dict[int, Arrival] = {}
        self._heap: list[tuple[int, int, Callable[[int], None]]] = []
        self._ties = count()
        self._num_pending = 0
        self._live: set[int] = set()
        self.run_so_far = Run()

    def run(self, arrivals: Iterable[Arrival], stays: Sequence[Stay], until_ns: int | None = None) -> Run:
        """Everything that happens, to the end of the last sequence or to `until_ns`."""
        for stay in stays:
            self._at(stay.attach_at_ns, partial(self._attach, stay.spec))
            if stay.detach_at_ns is not None:
                self._at(stay.detach_at_ns, partial(self._detach, stay.spec.replica_id))
        for arrival in arrivals:
            self._at(arrival.at_ns, partial(self._submit, arrival))
            if arrival.cancel_at_ns is not None:
                self._at(arrival.cancel_at_ns, partial(self._cancel, arrival.request.sequence_id))
        if self._heap:
            self._push(self._heap[0][0] + _TICK_NS, self._tick)
        out = self.run_so_far
        while self._heap and (self._num_pending or self._live):
            now, _, act = heapq.heappop(self._heap)
            if until_ns is not None and now > until_ns:
                break
            out.end_ns = now
            act(now)
            if not self._heap or self._heap[0][0] > now:
                self._plan_all(now)
        out.is_complete = not self._live and not self._num_pending
        return out

    # Events ------------------------------------------------------------------------------------------------------

    def _push(self, at_ns: int, act: Callable[[int], None]) -> None:
        heapq.heappush(self._heap, (at_ns, next(self._ties), act))

    def _at(self, at_ns: int, act: Callable[[int], None]) -> None:
        """Something that will happen, and without which the run is not over."""

        def happen(now: int) -> None:
            self._num_pending -= 1
            act(now)

        self._num_pending += 1
        self._push(at_ns, happen)

    def _tick(self, now: int) -> None:
        self._take(self._core.tick(now).events, now)
        # With nothing else to come, time alone would never end the run unless it ends sequences.
        if self._heap or any(self._arrivals[each].request.deadline_ns is not None for each in self._live):
            self._push(now + _TICK_NS, self._tick)

    def _attach(self, spec: ReplicaSpec, now: int) -> None:
        self._replicas[spec.replica_id] = _Replica(spec)
        self._take(self._core.attach(spec, now), now)

    def _detach(self, replica_id: int, now: int) -> None:
        del self._replicas[replica_id]
        self._take(self._core.detach(replica_id, now), now)

    def _submit(self, arrival: Arrival, now: int) -> None:
        request = arrival.request
        self._arrivals[request.sequence_id] = arrival
        times = SequenceTimes(now, num_prompt_tokens=len(request.prompt_token_ids), tenant=request.tenant)
        self.run_so_far.times[request.sequence_id] = times
        self._live.add(request.sequence_id)
        try:
            self._take(self._core.submit(request, now), now)
        except Refused as refused:
            self.run_so_far.first_refusal = self.run_so_far.first_refusal or str(refused)
            times.was_refused = True
            times.ended_ns = now
            self._live.discard(request.sequence_id)

    def _cancel(self, sequence_id: int, now: int) -> None:
        if sequence_id in self._live:
            self._take(self._core.cancel(sequence_id, now), now)

    def _plan_all(self, now: int) -> None:
        for replica in tuple(self._replicas.values()):
            while True:
                planned = self._core.plan(replica.spec.replica_id, now)
                self._take(planned.events, now)
                if planned.plan is None:
                    break
                replica.inbox.append(planned.plan)
            self._start(replica, now)

    # Steps -------------------------------------------------------------------------------------------------------

    def _start(self, replica: _Replica, now: int) -> None:
        if replica.is_running or not replica.inbox:
            return
        replica.is_running = True
        plan = replica.inbox.popleft()
        num_copies = len(plan.demote_host_ids) + len(plan.promote_host_ids)
        duration_ns = self._step_ns(plan, num_copies)
        result = self._execute(replica, plan, duration_ns, self._costs.copy_ns(num_copies))
        self.run_so_far.num_steps += 1
        self.run_so_far.busy_ns += duration_ns
        self._push(now + duration_ns, partial(self._complete, replica, result))

    def _complete(self, replica: _Replica, result: tuple[StepResult, list[int]], now: int) -> None:
        replica_id = replica.spec.replica_id
        if self._replicas.get(replica_id) is not replica:
            return  # it is gone, and its step with it
        replica.is_running = False
        step_result, sampled = result
        for sequence_id in sampled:
            if sequence_id in self._live:
                self.run_so_far.times[sequence_id].note_token(now)
        self._take(self._core.complete(replica_id, step_result, now), now)
        self._start(replica, now)

    def _step_ns(self, plan: StepPlan, num_copies: int) -> int:
        decode = kv = prefill = 0
        for start, num in zip(plan.row_starts, plan.row_counts, strict=True):
            if num == 1:
                decode += 1
                kv += start
            else:
                prefill += num
        return self._costs.step_ns(prefill, decode, kv, num_copies)

    def _execute(
        self, replica: _Replica, plan: StepPlan, duration_ns: int, copy_ns: int
    ) -> tuple[StepResult, list[int]]:
        """The step's result, and the sequences that got a token."""
        rows = replica.rows
        for slot in plan.released_slots:
            del rows[slot]
        for admission in plan.admissions:
            row = _Row(admission.sequence_id, len(admission.token_ids), admission.num_prompt_tokens)
            rows[admission.slot] = row
        token_ids, num_sampled, finishes, sampled = array("I"), [], dict[int, FinishReason](), list[int]()
        for index, (slot, start, num) in enumerate(zip(plan.row_slots, plan.row_starts, plan.row_counts, strict=True)):
            row = rows[slot]
            if row.has_ended or start + num < row.num_tokens:
                num_sampled.append(0)
                continue
            finish = self._finish(row, replica.spec.max_model_len)
            if finish is not None:
                finishes[index] = finish
                row.has_ended = True
            if finish is FinishReason.END_TOKEN:
                num_sampled.append(0)
                continue
            token_ids.append(self._token_at(row.sequence_id, row.num_tokens))
            row.num_tokens += 1
            num_sampled.append(1)
            sampled.append(row.sequence_id)
        spec = replica.spec
        result = StepResult(spec.incarnation, plan.step, num_sampled, token_ids, finishes, (), duration_ns, copy_ns)
        return result, sampled

    def _finish(self, row: _Row, max_model_len: int) -> FinishReason | None:
        arrival = self._arrivals[row.sequence_id]
        num_output = row.num_tokens - row.num_prompt_tokens
        if num_output >= arrival.num_output_tokens:
            return FinishReason.END_TOKEN
        is_last = num_output + 1 >= arrival.request.max_tokens or row.num_tokens + 1 >= max_model_len
        return FinishReason.LENGTH if is_last else None

    def _take(self, events: Iterable[Event], now: int) -> None:
        for event in events:
            self.run_so_far.times[event.sequence_id].note_event(event, now)
            if isinstance(event, Finished | Ended):
                self._live.discard(event.sequence_id)


def _distinct_token(sequence_id: int, position: int) -> int:
    """A token that no other sequence has, as far as 32 bits go."""
    return (sequence_id * 2_654_435_761 + position * 40_503 + 1) & 0xFFFFFFFF
