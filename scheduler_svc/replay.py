"""Makes a recording's decisions again, without model, clock or network, and says whether they are the same.

Knows the core and the recording. Blocks go by the names under which the recorded core knew them, so tokens matter only
to those who simulate.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from octavo.internal.v1 import recording_pb2 as pb
from scheduler_svc import state
from scheduler_svc.contents import Contents
from scheduler_svc.core.plan import StepResult
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.statistics import Statistics
from scheduler_svc.core.step import UnansweredPlan
from scheduler_svc.core.types import (
    CoreLimits,
    Event,
    FinishReason,
    IllegalTransition,
    Refused,
    ReplicaSpec,
    Request,
)
from scheduler_svc.decisions import Decisions
from scheduler_svc.measures import SequenceTimes
from scheduler_svc.recording import Recording, RecordingError, from_fields

_MISFITS = (ArithmeticError, AssertionError, IllegalTransition, LookupError, ValueError)
_MOST_TOKENS = 2**28
"""Of a request: more than a message holds that comes to a scheduler."""


@dataclass(frozen=True)
class Difference:
    """The first decision that came out otherwise."""

    index: int
    """Number of the record."""
    now_ns: int
    input: str


@dataclass
class StepSample:
    """What one recorded step computed and how long it took."""

    num_prefill_tokens: int
    num_decode_rows: int
    num_kv_tokens: int
    num_copies: int
    duration_ns: int


@dataclass
class Replayed:
    """What came out."""

    num_records: int = 0
    difference: Difference | None = None
    statistics: Statistics = field(default_factory=Statistics)
    steps: list[StepSample] = field(default_factory=list)
    sequences: dict[int, SequenceTimes] = field(default_factory=dict)


def limits_of(recording: Recording) -> CoreLimits:
    """The limits that the recorded core had. Raises RecordingError for ones that this version does not know."""
    return from_fields(CoreLimits, recording.header.limits)


def replay(recording: Recording) -> Replayed:
    """Makes all decisions again, up to the first that differs. Raises RecordingError where that cannot be done."""
    if recording.exact_defect is not None:
        raise RecordingError(recording.exact_defect)
    return _Replay(recording).run()


class _Replay:
    """One replay in progress."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._contents = Contents(recording.records)
        self._core = self._first_core()
        self._decisions = Decisions(recording.header.decisions)
        self._out = Replayed()

    def run(self) -> Replayed:
        out = self._out
        for index, record in enumerate(self._recording.records):
            kind = record.WhichOneof("input")
            if kind is None:
                raise RecordingError(f"record {index} holds an input that this version does not know")
            if kind == "content":
                continue
            try:
                self._apply(kind, record)
            except RecordingError:
                raise
            except _MISFITS as error:
                raise RecordingError(
                    f"record {index} ({kind}) does not fit those before it: {error}; the file is damaged"
                ) from error
            out.num_records += 1
            if self._decisions.value != record.decisions:
                out.difference = Difference(index, record.now_ns, kind)
                break
        out.statistics = self._core.statistics()
        return out

    def _first_core(self) -> Scheduler:
        """The core before the first record."""
        header, limits = self._recording.header, limits_of(self._recording)
        if not header.state:
            return Scheduler(limits)
        requests = {each.sequence_id: self._request(each) for each in header.requests}
        try:
            return state.read(header.state, limits, requests)
        except ValueError as error:
            raise RecordingError(f"the state that it begins with: {error}") from error

    def _apply(self, kind: str, record: pb.Record) -> None:
        core, now = self._core, record.now_ns
        match kind:
            case "submit":
                self._submit(record.submit, now)
            case "cancel":
                self._take(core.cancel(record.cancel, now), now)
            case "update":
                self._take(self._update(record.update, now), now)
            case "attach":
                self._take(core.attach(from_fields(ReplicaSpec, record.attach.fields), now), now)
            case "detach":
                self._take(core.detach(record.detach, now), now)
            case "drain":
                self._take(core.drain(record.drain, now), now)
            case "undrain":
                self._take(core.undrain(record.undrain, now), now)
            case "plan":
                self._plan(record.plan, now)
            case "complete":
                if not record.complete.was_refused:
                    self._complete(record.complete, now)
            case "tick":
                self._take(core.tick(now).events, now)
            case "reset":
                core.reset_prefix_cache()

    def _submit(self, recorded: pb.RecordedRequest, now: int) -> None:
        times = SequenceTimes(now, num_prompt_tokens=recorded.num_prompt_tokens, tenant=recorded.tenant)
        self._out.sequences[recorded.sequence_id] = times
        try:
            self._take(self._core.submit(self._request(recorded), now), now)
        except Refused as refused:
            times.was_refused = True
            times.ended_ns = now
            self._decisions.add_refusal(refused)

    def _request(self, recorded: pb.RecordedRequest) -> Request:
        tokens = array("I", recorded.token_ids) or array("I", bytes(4 * num_tokens(recorded)))
        return replace(request_of(recorded, tokens), block_names=self._contents.block_names(recorded.sequence_id))

    def _update(self, update: pb.RecordedUpdate, now: int) -> list[Event]:
        return self._core.update(
            update.sequence_id,
            now,
            priority=update.priority if update.HasField("priority") else None,
            deadline_ns=update.deadline_ns if update.HasField("deadline_ns") else None,
        )

    def _plan(self, replica_id: int, now: int) -> None:
        planned = self._core.plan(replica_id, now)
        self._decisions.add_planned(replica_id, planned)
        self._note(planned.events, now)

    def _complete(self, recorded: pb.RecordedResult, now: int) -> None:
        replica = self._core.fleet.replica(recorded.replica_id)
        plan = replica.rows.unanswered[0]
        if recorded.num_rows != len(plan.rows):
            raise ValueError(f"a result of {recorded.num_rows} rows answers a plan of {len(plan.rows)}")
        self._out.steps.append(_sample(plan, recorded.duration_ns))
        silent = set(recorded.silent_rows)
        num_sampled = [0 if row in silent else 1 for row in range(recorded.num_rows)]
        result = StepResult(
            incarnation=replica.spec.incarnation,
            step=recorded.step,
            num_sampled=num_sampled,
            token_ids=recorded.token_ids or [0] * sum(num_sampled),
            finishes={
                row: FinishReason(reason)
                for row, reason in zip(recorded.finished_rows, recorded.finish_reasons, strict=True)
            },
            undelivered_rows=tuple(recorded.undelivered_rows),
            duration_ns=recorded.duration_ns,
            copy_ns=recorded.copy_ns,
        )
        for sequence, num in zip(plan.rows, num_sampled, strict=True):
            times = self._out.sequences.get(sequence.sequence_id)
            if num and times is not None and times.ended_ns is None:
                times.note_token(now)
        self._take(self._core.complete(recorded.replica_id, result, now), now)

    def _take(self, events: Iterable[Event], now: int) -> None:
        events = list(events)
        self._decisions.add_events(events)
        self._note(events, now)

    def _note(self, events: Iterable[Event], now: int) -> None:
        for event in events:
            times = self._out.sequences.get(event.sequence_id)
            if times is not None:  # else it came before the first record, and its times are not known
                times.note_event(event, now)


def num_tokens(recorded: pb.RecordedRequest) -> int:
    """Prompt and prior tokens of a request. Raises RecordingError for more than there can be."""
    num = recorded.num_prompt_tokens + recorded.num_prior_tokens
    if num > _MOST_TOKENS:
        raise RecordingError(f"a request of {num} tokens, more than a scheduler takes: the file is damaged")
    return num


def request_of(recorded: pb.RecordedRequest, tokens: array[int]) -> Request:
    """The request as the core takes it, with these tokens."""
    num_prompt = recorded.num_prompt_tokens
    values: dict[str, object] = {
        "sequence_id": recorded.sequence_id,
        "model": recorded.model,
        "prompt_token_ids": tokens[:num_prompt],
        "max_tokens": recorded.max_tokens,
        "prior_token_ids": tokens[num_prompt:],
        "prompt_logprobs_start": recorded.prompt_logprobs_start if recorded.HasField("prompt_logprobs_start") else None,
        "adapter": recorded.adapter,
        "tenant": recorded.tenant,
        "cache_salt": recorded.cache_salt,
        "priority": recorded.priority,
        "deadline_ns": recorded.deadline_ns if recorded.HasField("deadline_ns") else None,
        "age_ns": recorded.age_ns,
        "group_id": recorded.group_id,
        "group_size": recorded.group_size,
        "router_id": recorded.router_id,
        "attempt": recorded.attempt,
        "crash_group_sizes": tuple(recorded.crash_group_sizes),
        "queue_events": recorded.queue_events,
    }
    return Request(**values)  # type: ignore[arg-type]  # one dict of many types


def _sample(plan: UnansweredPlan, duration_ns: int) -> StepSample:
    prefill = decode = kv = 0
    for start, count in zip(plan.starts, plan.counts, strict=True):
        if count == 1:
            decode += 1
            kv += start
        else:
            prefill += count
    return StepSample(prefill, decode, kv, plan.num_copies, duration_ns)
