"""A whole small system around the core, in one thread: simulated replicas below it, a router's bookkeeping above it.

Every call of the core goes through here, the laws are checked after each, each event is checked against the sequence's
history, and every token that reaches the router is compared with what the sequence yields alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from scheduler_svc.core import laws
from scheduler_svc.core.plan import Limit, Planned, StepPlan, StepResult
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import (
    CoreLimits,
    Ended,
    EndReason,
    Event,
    Finished,
    FinishReason,
    Preempted,
    RefusalReason,
    Refused,
    ReplicaSpec,
    Request,
    Scheduled,
)
from tests.fakes.simulated_replica import Delivery, SimulatedReplica, SimulatedSampling, continuation

VOCAB_SIZE = 50
MAX_MODEL_LEN = 100
RETRIED = (EndReason.REPLICA_LOST, EndReason.UNDELIVERED)

_alone = lru_cache(continuation)


def spec(replica_id: int = 1, **changes: object) -> ReplicaSpec:
    """A small replica: 16 blocks of 4 tokens, 4 slots, 16 tokens a step."""
    base = ReplicaSpec(
        replica_id=replica_id,
        name=f"replica-{replica_id}",
        incarnation=1000 + replica_id,
        model="model",
        fingerprint="f",
        max_model_len=MAX_MODEL_LEN,
        block_size=4,
        num_device_blocks=16,
        num_slots=4,
        max_step_tokens=16,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


@dataclass
class Stream:
    """A router's view of one sequence, over all its attempts."""

    request: Request
    received: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    """By the worker's word or the scheduler's."""
    is_cut: bool = False
    """A token of the present attempt was lost on its way."""
    is_running: bool = False
    outcome: Finished | Ended | None = None
    """The last attempt's terminal event."""
    num_ends: int = 0
    """Terminal events of the present attempt."""
    events: list[Event] = field(default_factory=list)

    @property
    def is_live(self) -> bool:
        """Whether the present attempt has not ended."""
        return self.num_ends == 0


class House:
    """The system. Ids of sequences, streams and replicas count from 1."""

    def __init__(self, limits: CoreLimits | None = None) -> None:
        """Without limits, no room is kept for the growth of sequences before some have ended: so some are preempted."""
        self.scheduler = Scheduler(limits or CoreLimits(expected_output_tokens=0))
        self.replicas: dict[int, SimulatedReplica] = {}
        self.results: dict[int, deque[StepResult]] = {}
        self.streams: dict[int, Stream] = {}
        self.now = 0
        self.resubmits = True
        """Whether the router tries again after retriable ends."""
        self.may_be_poison = False
        """Whether losses of a replica that ran a sequence alone count; most losses here are not its fault."""
        self.checks_laws = True
        """Whether the laws are checked after each call: always, but where thousands are submitted at first."""
        self._stream_of: dict[int, Stream] = {}  # sequence id -> stream
        self._next_id = 1

    def _check(self) -> None:
        if self.checks_laws:
            laws.check(self.scheduler)

    # Above the core --------------------------------------------------------------------------------------------

    def submit(self, prompt: Sequence[int], max_tokens: int = 8, **fields: object) -> Stream:
        """A new stream; further fields are the request's, or SimulatedSampling's end_token_ids."""
        key = self._next_id
        end = fields.pop("end_token_ids", ())
        request = Request(
            sequence_id=key,
            model="model",
            prompt_token_ids=tuple(prompt),
            max_tokens=max_tokens,
            sampling=SimulatedSampling(max_tokens, end),  # type: ignore[arg-type]
            stream_key=key,
        )
        request = replace(request, **fields)  # type: ignore[arg-type]
        stream = Stream(request, received=list(request.prior_token_ids))
        self._send(stream)
        self.streams[key] = stream
        return stream

    def _send(self, stream: Stream) -> None:
        """Raises Refused, after which no trace is left."""
        self._next_id = max(self._next_id, stream.request.sequence_id + 1)
        self._stream_of[stream.request.sequence_id] = stream
        try:
            self._take(self.scheduler.submit(stream.request, self.now))
        finally:
            self._check()

    def cancel(self, stream: Stream) -> None:
        """The client went away."""
        self._take(self.scheduler.cancel(stream.request.sequence_id, self.now))
        self._check()

    def update(self, stream: Stream, priority: int | None = None, deadline_ns: int | None = None) -> None:
        """An operator changes a live stream's place."""
        sequence_id = stream.request.sequence_id
        self._take(self.scheduler.update(sequence_id, self.now, priority=priority, deadline_ns=deadline_ns))
        self._check()

    def tick(self) -> tuple[str, ...]:
        """Time passes; returns the advice."""
        ticked = self.scheduler.tick(self.now)
        self._take(ticked.events)
        self._check()
        return tuple(ticked.advice)

    def drain_replica(self, replica_id: int) -> None:
        """An operator drains a replica."""
        self._take(self.scheduler.drain(replica_id, self.now))
        self._check()

    def _deliver(self, delivery: Delivery) -> None:
        stream = self.streams[delivery.stream_key]
        if delivery.attempt != stream.request.attempt or not stream.is_live:
            return
        if stream.is_cut:
            assert delivery.position > len(stream.received), "a token is doubled"
            return
        assert delivery.position == len(stream.received), "a token is lost or doubled"
        stream.received.extend(delivery.token_ids)
        if delivery.finish is not None:
            assert stream.finish is None
            stream.finish = delivery.finish
        self._compare(stream)

    def _compare(self, stream: Stream) -> None:
        sampling = stream.request.sampling
        assert isinstance(sampling, SimulatedSampling)
        alone, finish = _alone(tuple(stream.request.prompt_token_ids), sampling, VOCAB_SIZE, MAX_MODEL_LEN)
        assert stream.received == alone[: len(stream.received)]
        if stream.finish in (FinishReason.END_TOKEN, FinishReason.STOP_TOKEN):
            assert (stream.received, stream.finish) == (alone, finish)

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            stream = self._stream_of[event.sequence_id]
            assert stream.num_ends == 0, f"{event} after the end"
            stream.events.append(event)
            if isinstance(event, Scheduled):
                assert not stream.is_running
                stream.is_running = True
            elif isinstance(event, Preempted):
                assert stream.is_running
                stream.is_running = False
            elif isinstance(event, Finished | Ended):
                self._end(stream, event)

    def _end(self, stream: Stream, event: Finished | Ended) -> None:
        stream.num_ends += 1
        stream.outcome = event
        stream.is_running = False
        if isinstance(event, Finished):
            assert event.num_output_tokens == len(stream.received)
            assert stream.finish in (None, event.reason)
            stream.finish = event.reason
            self._compare(stream)
        elif event.reason in RETRIED and stream.finish is None and self.resubmits:
            crashes = list(stream.request.crash_group_sizes)
            if event.replica_lost is not None and event.replica_lost.rows_in_step > (0 if self.may_be_poison else 1):
                crashes.append(event.replica_lost.rows_in_step)
            stream.request = replace(
                stream.request,
                sequence_id=self._next_id,
                prior_token_ids=tuple(stream.received),
                attempt=stream.request.attempt + 1,
                crash_group_sizes=tuple(crashes),
            )
            stream.num_ends = 0
            stream.is_cut = False
            try:
                self._send(stream)
            except Refused as refused:
                if refused.reason not in (RefusalReason.DEADLINE, RefusalReason.POISON):
                    raise
                stream.num_ends = 1  # over for the client, too
                stream.outcome = Ended(stream.request.sequence_id, EndReason.DEADLINE)

    def undrain_replica(self, replica_id: int) -> None:
        """An operator lets it serve again."""
        self._take(self.scheduler.undrain(replica_id, self.now))
        self._check()

    # Below the core --------------------------------------------------------------------------------------------

    def attach(self, replica: ReplicaSpec) -> SimulatedReplica:
        """A replica says Hello."""
        self._take(self.scheduler.attach(replica, self.now))
        simulated = self.replicas[replica.replica_id] = SimulatedReplica(replica, VOCAB_SIZE)
        self.results[replica.replica_id] = deque()
        self._check()
        return simulated

    def detach(self, replica_id: int) -> None:
        """A replica dies, with its plans and results."""
        del self.replicas[replica_id], self.results[replica_id]
        self._take(self.scheduler.detach(replica_id, self.now))
        self._check()

    def plan(self, replica_id: int = 1) -> Planned:
        """The core plans, and the plan is sent."""
        self.now += 1000
        planned = self.scheduler.plan(replica_id, self.now)
        self._take(planned.events)
        self._check()
        if planned.plan is not None:
            self.replicas[replica_id].receive(planned.plan)
        elif self.scheduler.statistics().replicas[0].num_unanswered_plans == 0 and len(self.replicas) == 1:
            num_waiting = sum(self.scheduler.statistics().num_waiting.values())
            assert num_waiting == 0 or planned.limited_by is not Limit.NOTHING_WAITING
        return planned

    def make_plan(self, replica_id: int = 1) -> StepPlan:
        """As `plan`, where there must be one."""
        planned = self.plan(replica_id)
        assert planned.plan is not None, planned.limited_by
        return planned.plan

    def run(self, replica_id: int = 1) -> None:
        """The replica executes its oldest plan: tokens reach the router, the result is under way."""
        outcome = self.replicas[replica_id].run()
        self.results[replica_id].append(outcome.result)
        for delivery in outcome.deliveries:
            self._deliver(delivery)
        for delivery in outcome.lost:
            stream = self.streams[delivery.stream_key]
            stream.is_cut = stream.is_cut or stream.request.attempt == delivery.attempt

    def complete(self, replica_id: int = 1) -> None:
        """The oldest result arrives."""
        self._take(self.scheduler.complete(replica_id, self.results[replica_id].popleft(), self.now))
        self._check()

    def step(self, replica_id: int = 1) -> Planned:
        """One plan, executed and answered at once."""
        planned = self.plan(replica_id)
        if planned.plan is not None:
            self.run(replica_id)
            self.complete(replica_id)
        return planned

    def drain(self, max_steps: int = 5000) -> None:
        """Runs all replicas, two plans deep, until every stream is over."""
        for _ in range(max_steps):
            for replica_id in list(self.replicas):
                while self.plan(replica_id).plan is not None:
                    pass
                if self.replicas[replica_id].inbox:
                    self.run(replica_id)
                if self.results[replica_id]:
                    self.complete(replica_id)
            has_plans = any(replica.inbox for replica in self.replicas.values())
            if not self.scheduler.sequences and not has_plans and not any(self.results.values()):
                break
        else:
            raise AssertionError(f"not drained: {self.scheduler.statistics()}")
        for statistics in self.scheduler.statistics().replicas:
            assert (statistics.num_running, statistics.num_used_blocks) == (0, 0)
        assert sum(self.scheduler.statistics().num_waiting.values()) == 0

    def check_outcomes(self, num_cache_tokens: int = 64) -> None:
        """After `drain`: every stream ended once, with the whole text it gets alone."""
        for stream in self.streams.values():
            assert stream.num_ends == 1
            if isinstance(stream.outcome, Ended) and stream.outcome.reason not in RETRIED:
                continue
            if stream.finish is FinishReason.NUMERIC_ERROR:
                continue
            sampling = stream.request.sampling
            assert isinstance(sampling, SimulatedSampling)
            prompt = stream.request.prompt_token_ids
            alone, finish = _alone(tuple(prompt), sampling, VOCAB_SIZE, MAX_MODEL_LEN)
            # The last token that is sampled needs no place in the cache; an unlisted end token is such a one.
            num_places = len(prompt) + len(alone) - (1 if finish is FinishReason.LENGTH else 0)
            if num_places > num_cache_tokens:
                alone, finish = alone[: num_cache_tokens + 1 - len(prompt)], FinishReason.LENGTH
            assert (stream.received, stream.finish) == (alone, finish)
