"""The flight recorder: the core's inputs, in a bounded ring, from which its decisions can be made again.

Stands between the engine and the core and passes everything on. Holds no prompt: of each sequence that ends it notes
salted hashes of its full blocks, each over all tokens up to the block's end. Decisions rest on tokens through the
prefix cache alone, which asks whether two such beginnings are equal, and hashes answer that. With `record_tokens` it
holds the token ids in place of hashes.

The ring forgets its oldest records first. A core cannot be set to a state, so decisions can be made again only from a
recording that reaches back to the scheduler's start; one that does not says so, and is still good for comparing
policies over the requests that it holds.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version

from octavo.internal.v1 import recording_pb2 as pb
from scheduler_svc import recording
from scheduler_svc.core.history import Explanation
from scheduler_svc.core.limits import CoreLimits, SchedulingPolicy
from scheduler_svc.core.plan import Limit, Planned, StepResult
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.statistics import Statistics
from scheduler_svc.core.types import (
    Ended,
    Event,
    Finished,
    Refused,
    ReplicaSpec,
    Request,
    ResultMismatch,
    Ticked,
)
from scheduler_svc.decisions import Decisions

_HASH_BYTES = 8
# What a record takes beside its bytes.
_OVERHEAD_BYTES = 120


@dataclass
class _Stay:
    """A replica, and the numbers of the records that say that it came and went."""

    replica: pb.RecordedReplica
    attached_at: int
    detached_at: int | None = None


class Recorder:
    """A core whose inputs are noted. Has the core's own methods."""

    def __init__(self, core: Scheduler, *, salt: bytes, max_bytes: int, record_tokens: bool = False) -> None:
        """`salt` is secret, 16 random bytes for each start; `max_bytes` bounds the ring."""
        self.core = core
        self._salt = salt
        self._max_bytes = max_bytes
        self._records_tokens = record_tokens
        self._hashes_content = core.limits.enable_prefix_caching and not record_tokens
        self._decisions = Decisions()
        self._ring: deque[tuple[bytes, int]] = deque()
        self._num_bytes = 0
        self._num_dropped = 0
        self._sum_before = 0
        self._defect = ""
        self._now = 0
        self._live: dict[int, Sequence] = {}
        self._block_sizes: dict[str, int] = {}
        self._tenants: set[str] = set()
        self._stays: dict[int, _Stay] = {}

    @property
    def limits(self) -> CoreLimits:
        """As Scheduler.limits."""
        return self.core.limits

    # The core's inputs -------------------------------------------------------------------------------------------

    def submit(self, request: Request, now: int) -> list[Event]:
        """As Scheduler.submit."""
        if self.limits.policy is SchedulingPolicy.FAIR:
            self._tenants.add(request.tenant)
        record = pb.Record(now_ns=now, submit=self._request(request))
        try:
            events = self.core.submit(request, now)
        except Refused as refused:
            self._decisions.add_refusal(refused)
            self._note(record)
            raise
        sequence = self.core.sequences.get(request.sequence_id)
        if sequence is not None:
            self._live[request.sequence_id] = sequence
        return self._noted(record, events)

    def cancel(self, sequence_id: int, now: int) -> list[Event]:
        """As Scheduler.cancel."""
        events = self.core.cancel(sequence_id, now)
        return self._noted(pb.Record(now_ns=now, cancel=sequence_id), events)

    def update(
        self, sequence_id: int, now: int, *, priority: int | None = None, deadline_ns: int | None = None
    ) -> list[Event]:
        """As Scheduler.update."""
        events = self.core.update(sequence_id, now, priority=priority, deadline_ns=deadline_ns)
        update = pb.RecordedUpdate(sequence_id=sequence_id, priority=priority, deadline_ns=deadline_ns)
        return self._noted(pb.Record(now_ns=now, update=update), events)

    def attach(self, replica: ReplicaSpec, now: int) -> list[Event]:
        """As Scheduler.attach."""
        events = self.core.attach(replica, now)
        before = self._block_sizes.setdefault(replica.model, replica.block_size)
        if before != replica.block_size and self._hashes_content:
            self._defect = (
                f"replicas of {replica.model} had blocks of {before} and of {replica.block_size} tokens, which hashes "
                "of one size cannot tell apart; record such a fleet with --record-tokens"
            )
        fields = pb.RecordedReplica(fields=recording.to_fields(replica))
        self._stays[replica.replica_id] = _Stay(fields, self._num_noted)
        return self._noted(pb.Record(now_ns=now, attach=fields), events)

    def detach(self, replica_id: int, now: int) -> list[Event]:
        """As Scheduler.detach."""
        events = self.core.detach(replica_id, now)
        self._stays[replica_id].detached_at = self._num_noted
        self._forget_stays()
        return self._noted(pb.Record(now_ns=now, detach=replica_id), events)

    def drain(self, replica_id: int, now: int) -> list[Event]:
        """As Scheduler.drain."""
        events = self.core.drain(replica_id, now)
        return self._noted(pb.Record(now_ns=now, drain=replica_id), events)

    def plan(self, replica_id: int, now: int) -> Planned:
        """As Scheduler.plan."""
        planned = self.core.plan(replica_id, now)
        if planned.limited_by is Limit.UNANSWERED_PLANS and not planned.events:
            return planned  # nothing was looked at and nothing has changed
        self._decisions.add_planned(replica_id, planned)
        self._note(pb.Record(now_ns=now, plan=replica_id))
        self._note_ends(planned.events, now)
        return planned

    def complete(self, replica_id: int, result: StepResult, now: int) -> list[Event]:
        """As Scheduler.complete."""
        recorded = self._result(replica_id, result)
        record = pb.Record(now_ns=now, complete=recorded)
        try:
            events = self.core.complete(replica_id, result, now)
        except ResultMismatch:
            recorded.was_refused = True
            self._note(pb.Record(now_ns=now, complete=recorded))
            raise
        return self._noted(record, events)

    def tick(self, now: int) -> Ticked:
        """As Scheduler.tick."""
        ticked = self.core.tick(now)
        self._noted(pb.Record(now_ns=now, tick=pb.RecordedTick()), list(ticked.events))
        return ticked

    def reset_prefix_cache(self) -> int:
        """As Scheduler.reset_prefix_cache, which is told no time."""
        num_blocks = self.core.reset_prefix_cache()
        self._note(pb.Record(now_ns=self._now, reset=pb.RecordedReset()))
        return num_blocks

    def explain(self, sequence_id: int) -> Explanation | None:
        """As Scheduler.explain."""
        return self.core.explain(sequence_id)

    def statistics(self) -> Statistics:
        """As Scheduler.statistics."""
        return self.core.statistics()

    # The file ----------------------------------------------------------------------------------------------------

    def dump(self, now: int) -> Iterator[bytes]:
        """The file, in pieces, as it is at this moment. Live sequences' blocks are in it as far as they are known."""
        self._forget_stays()
        weights = {self._name(tenant): weight for tenant, weight in self.limits.tenant_weights.items()}
        header = pb.RecordingHeader(
            version=recording.VERSION,
            software=_software(),
            limits=recording.to_fields(replace(self.core.limits, tenant_weights=weights)),
            salt_id=blake2b(self._salt, digest_size=_HASH_BYTES, person=b"octavo salt id").hexdigest(),
            has_tokens=self._records_tokens,
            num_dropped_records=self._num_dropped,
            defect=self._defect,
            decisions=self._sum_before,
            replicas=[stay.replica for stay in self._stays.values() if stay.attached_at < self._num_dropped],
            tenant_ranks={self._name(tenant): rank for rank, tenant in enumerate(sorted(self._tenants))},
        )
        records = [data for data, _ in self._ring]
        live = [content for item in self._live.items() if (content := self._content(*item, now)) is not None]
        records += [recording.frame(content.SerializeToString()) for content in live]
        return recording.write(header, records)

    # Inside ------------------------------------------------------------------------------------------------------

    @property
    def _num_noted(self) -> int:
        """Records so far, and so the number of the next one."""
        return self._num_dropped + len(self._ring)

    def _forget_stays(self) -> None:
        """Of replicas that detached before the first record that is kept."""
        for replica_id, stay in tuple(self._stays.items()):
            if stay.detached_at is not None and stay.detached_at < self._num_dropped:
                del self._stays[replica_id]

    def _noted(self, record: pb.Record, events: list[Event]) -> list[Event]:
        self._decisions.add_events(events)
        self._note(record)
        self._note_ends(events, record.now_ns)
        return events

    def _note_ends(self, events: Iterable[Event], now: int) -> None:
        for event in events:
            if isinstance(event, Ended | Finished):
                sequence = self._live.pop(event.sequence_id, None)
                content = None if sequence is None else self._content(event.sequence_id, sequence, now)
                if content is not None:
                    self._note(content)

    def _note(self, record: pb.Record) -> None:
        record.decisions = self._decisions.value
        self._now = record.now_ns
        data = recording.frame(record.SerializeToString())
        self._ring.append((data, self._decisions.value))
        self._num_bytes += len(data) + _OVERHEAD_BYTES
        while self._num_bytes > self._max_bytes and len(self._ring) > 1:
            dropped, self._sum_before = self._ring.popleft()
            self._num_bytes -= len(dropped) + _OVERHEAD_BYTES
            self._num_dropped += 1

    def _content(self, sequence_id: int, sequence: Sequence, now: int) -> pb.Record | None:
        block_size = self._block_sizes.get(sequence.request.model)
        if not self._hashes_content or block_size is None:
            return None
        hashes = self._block_hashes(sequence.token_ids, block_size)
        content = pb.RecordedContent(sequence_id=sequence_id, block_size=block_size, block_hashes=hashes)
        return pb.Record(now_ns=now, decisions=self._decisions.value, content=content)

    def _block_hashes(self, token_ids: array[int], block_size: int) -> list[int]:
        state, found = blake2b(key=self._salt, digest_size=_HASH_BYTES), []
        data, num_bytes = memoryview(token_ids).cast("B"), block_size * token_ids.itemsize
        for end in range(num_bytes, len(data) + 1, num_bytes):
            state.update(data[end - num_bytes : end])
            found.append(int.from_bytes(state.copy().digest(), "little"))
        return found

    def _name(self, name: str) -> str:
        """A name that tells nothing but whether two are the same."""
        return blake2b(name.encode(), key=self._salt, digest_size=_HASH_BYTES).hexdigest() if name else ""

    def _request(self, request: Request) -> pb.RecordedRequest:
        tokens = (*request.prompt_token_ids, *request.prior_token_ids) if self._records_tokens else ()
        return pb.RecordedRequest(
            sequence_id=request.sequence_id,
            model=request.model,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_prior_tokens=len(request.prior_token_ids),
            token_ids=tokens,
            max_tokens=request.max_tokens,
            prompt_logprobs_start=request.prompt_logprobs_start,
            adapter=request.adapter,
            tenant=self._name(request.tenant),
            cache_salt=self._name(request.cache_salt),
            priority=request.priority,
            deadline_ns=request.deadline_ns,
            age_ns=request.age_ns,
            group_id=self._name(request.group_id),
            group_size=request.group_size,
            router_id=request.router_id,
            attempt=request.attempt,
            crash_group_sizes=request.crash_group_sizes,
            queue_events=request.queue_events,
        )

    def _result(self, replica_id: int, result: StepResult) -> pb.RecordedResult:
        return pb.RecordedResult(
            replica_id=replica_id,
            step=result.step,
            num_rows=len(result.num_sampled),
            silent_rows=_silent_rows(result),
            token_ids=result.token_ids if self._records_tokens else (),
            finished_rows=list(result.finishes),
            finish_reasons=[reason.value for reason in result.finishes.values()],
            undelivered_rows=result.undelivered_rows,
            duration_ns=result.duration_ns,
            copy_ns=result.copy_ns,
        )


def _silent_rows(result: StepResult) -> list[int]:
    if len(result.token_ids) == len(result.num_sampled):
        return []
    return [row for row, num in enumerate(result.num_sampled) if num == 0]


def _software() -> str:
    try:
        return version("octavo")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"
