"""Makes a recording's decisions again, without model, clock or network, and says whether they are the same.

Knows the core and the recording. Where a recording holds hashes in place of tokens, each block's tokens are made up
from its hash, so that beginnings are equal exactly where they were.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from octavo.internal.v1 import recording_pb2 as pb
from scheduler_svc.core.plan import Planned, StepResult
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.statistics import Statistics
from scheduler_svc.core.types import (
    CoreLimits,
    Event,
    FinishReason,
    Refused,
    ReplicaSpec,
    Request,
)
from scheduler_svc.decisions import Decisions
from scheduler_svc.measures import SequenceTimes
from scheduler_svc.recording import Recording, RecordingError, from_fields


class Contents:
    """The tokens of recorded sequences: their own, or made up from the hashes of their blocks."""

    def __init__(self, records: Iterable[pb.Record]) -> None:
        self._contents = {
            record.content.sequence_id: record.content for record in records if record.HasField("content")
        }

    def token_id(self, sequence_id: int, position: int) -> int:
        """The token at a position of a sequence, prompt included; below 2**32."""
        content = self._contents.get(sequence_id)
        if content is None or position >= content.block_size * len(content.block_hashes):
            # In a block that never was full, or of which nothing is known: like no other.
            digest = blake2b(b"%d.%d" % (sequence_id, position), digest_size=4).digest()
            return int.from_bytes(digest, "little")
        block, offset = divmod(position, content.block_size)
        # Two words hold a hash; in blocks of one token the first must do.
        return (content.block_hashes[block] >> (32 * offset)) & 0xFFFFFFFF if offset < 2 else 0

    def num_tokens(self, sequence_id: int) -> int:
        """Tokens in the full blocks of a sequence that are known; 0 of none."""
        content = self._contents.get(sequence_id)
        return content.block_size * len(content.block_hashes) if content is not None else 0

    def tokens(self, sequence_id: int, begin: int, end: int) -> array[int]:
        """Tokens at positions begin ... end - 1."""
        return array("I", (self.token_id(sequence_id, position) for position in range(begin, end)))


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
    limits = from_fields(CoreLimits, recording.header.limits)
    weights = {tenant_of(recording, name): weight for name, weight in limits.tenant_weights.items()}
    return replace(limits, tenant_weights=weights)


def tenant_of(recording: Recording, name: str) -> str:
    """A tenant's name for the core: the salted hash, behind what keeps it in the order of the true names."""
    rank = recording.header.tenant_ranks.get(name)
    return name if rank is None else f"{rank:08}.{name}"


def replay(recording: Recording) -> Replayed:
    """Makes all decisions again, up to the first that differs. Raises RecordingError where that cannot be done."""
    if recording.exact_defect is not None:
        raise RecordingError(recording.exact_defect)
    return _Replay(recording).run()


class _Replay:
    """One replay in progress."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._core = Scheduler(limits_of(recording))
        self._decisions = Decisions()
        self._contents = Contents(recording.records)
        self._plans: dict[int, deque[tuple[Planned, list[int]]]] = {}
        self._slots: dict[int, dict[int, int]] = {}
        self._incarnations: dict[int, int] = {}
        self._out = Replayed()

    def run(self) -> Replayed:
        out = self._out
        for index, record in enumerate(self._recording.records):
            kind = record.WhichOneof("input")
            if kind is None:
                raise RecordingError(f"record {index} holds an input that this version does not know")
            if kind == "content":
                continue
            self._apply(kind, record)
            out.num_records += 1
            if self._decisions.value != record.decisions:
                out.difference = Difference(index, record.now_ns, kind)
                break
        out.statistics = self._core.statistics()
        return out

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
                spec = from_fields(ReplicaSpec, record.attach.fields)
                self._incarnations[spec.replica_id] = spec.incarnation
                self._take(core.attach(spec, now), now)
            case "detach":
                self._plans.pop(record.detach, None)
                self._slots.pop(record.detach, None)
                self._take(core.detach(record.detach, now), now)
            case "drain":
                self._take(core.drain(record.drain, now), now)
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
            request = request_of(recorded, self._contents, {"tenant": tenant_of(self._recording, recorded.tenant)})
            self._take(self._core.submit(request, now), now)
        except Refused as refused:
            times.was_refused = True
            times.ended_ns = now
            self._decisions.add_refusal(refused)

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
        if planned.plan is None:
            return
        slots = self._slots.setdefault(replica_id, {})
        for admission in planned.plan.admissions:
            slots[admission.slot] = admission.sequence_id
        rows = [slots[slot] for slot in planned.plan.row_slots]
        self._plans.setdefault(replica_id, deque()).append((planned, rows))

    def _complete(self, recorded: pb.RecordedResult, now: int) -> None:
        replica_id = recorded.replica_id
        planned, rows = self._plans[replica_id].popleft()
        self._out.steps.append(_sample(planned, recorded.duration_ns))
        silent = set(recorded.silent_rows)
        num_sampled = [0 if row in silent else 1 for row in range(recorded.num_rows)]
        result = StepResult(
            incarnation=self._incarnations[replica_id],
            step=recorded.step,
            num_sampled=num_sampled,
            token_ids=recorded.token_ids or self._sampled(rows, num_sampled),
            finishes={
                row: FinishReason(reason)
                for row, reason in zip(recorded.finished_rows, recorded.finish_reasons, strict=True)
            },
            undelivered_rows=tuple(recorded.undelivered_rows),
            duration_ns=recorded.duration_ns,
            copy_ns=recorded.copy_ns,
        )
        for sequence_id, num in zip(rows, num_sampled, strict=True):
            times = self._out.sequences[sequence_id]
            if num and times.ended_ns is None:
                times.note_token(now)
        self._take(self._core.complete(replica_id, result, now), now)

    def _sampled(self, rows: list[int], num_sampled: list[int]) -> array[int]:
        tokens = array("I")
        for sequence_id, num in zip(rows, num_sampled, strict=True):
            if num:
                sequence = self._core.sequences.get(sequence_id)
                # One that has ended meanwhile has no tokens any more, and nobody looks at this one.
                position = len(sequence.token_ids) if sequence is not None else 0
                tokens.append(self._contents.token_id(sequence_id, position))
        return tokens

    def _take(self, events: Iterable[Event], now: int) -> None:
        events = list(events)
        self._decisions.add_events(events)
        self._note(events, now)

    def _note(self, events: Iterable[Event], now: int) -> None:
        for event in events:
            self._out.sequences[event.sequence_id].note_event(event, now)


def request_of(
    recorded: pb.RecordedRequest, contents: Contents, overrides: Mapping[str, object] | None = None
) -> Request:
    """The request as the core takes it, with made-up tokens where there are no others; `overrides` are fields of it."""
    num_prompt, num_prior = recorded.num_prompt_tokens, recorded.num_prior_tokens
    tokens = array("I", recorded.token_ids) or contents.tokens(recorded.sequence_id, 0, num_prompt + num_prior)
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
        **(overrides or {}),
    }
    return Request(**values)  # type: ignore[arg-type]  # one dict of many types


def _sample(planned: Planned, duration_ns: int) -> StepSample:
    plan = planned.plan
    assert plan is not None, "only plans are answered"
    prefill = decode = kv = 0
    for start, count in zip(plan.row_starts, plan.row_counts, strict=True):
        if count == 1:
            decode += 1
            kv += start
        else:
            prefill += count
    return StepSample(prefill, decode, kv, len(plan.demote_host_ids) + len(plan.promote_host_ids), duration_ns)
