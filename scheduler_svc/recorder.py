"""The flight recorder: the core's inputs, in a bounded ring, from which its decisions can be made again.

Stands between the engine and the core and passes everything on. Holds no prompt: of each sequence that ends it notes
salted names of its full blocks. Decisions rest on tokens through the prefix cache alone, which asks whether two
beginnings are equal, and the names answer that. With `record_tokens` it holds the token ids too.

The ring forgets its oldest records first, and holds the state that the core had before those which are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

from octavo.internal.v1 import recording_pb2 as pb
from scheduler_svc import recording
from scheduler_svc.core.history import Explanation
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import Limit, Planned, StepResult
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.statistics import Statistics
from scheduler_svc.core.types import Ended, Event, Finished, Refused, ReplicaSpec, Request, ResultMismatch, Ticked
from scheduler_svc.decisions import Decisions
from scheduler_svc.recorded import Pseudonyms, result_record
from scheduler_svc.ring import Ring
from scheduler_svc.state import capture, write


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
        self._pseudonyms = Pseudonyms(salt)
        self._records_tokens = record_tokens
        self._decisions = Decisions()
        self._ring = Ring(max_bytes, lambda: capture(core))
        self._now = 0
        self._live: dict[int, Sequence] = {}
        self._stays: dict[int, _Stay] = {}

    @property
    def limits(self) -> CoreLimits:
        """As Scheduler.limits."""
        return self.core.limits

    # The core's inputs -------------------------------------------------------------------------------------------

    def submit(self, request: Request, now: int) -> list[Event]:
        """As Scheduler.submit."""
        record = pb.Record(now_ns=now, submit=self._pseudonyms.request(request, self._records_tokens))
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
        fields = pb.RecordedReplica(fields=recording.to_fields(replica))
        self._stays[replica.replica_id] = _Stay(fields, self._ring.num_noted)
        return self._noted(pb.Record(now_ns=now, attach=fields), events)

    def detach(self, replica_id: int, now: int) -> list[Event]:
        """As Scheduler.detach."""
        events = self.core.detach(replica_id, now)
        self._stays[replica_id].detached_at = self._ring.num_noted
        self._forget_stays()
        return self._noted(pb.Record(now_ns=now, detach=replica_id), events)

    def drain(self, replica_id: int, now: int) -> list[Event]:
        """As Scheduler.drain."""
        events = self.core.drain(replica_id, now)
        return self._noted(pb.Record(now_ns=now, drain=replica_id), events)

    def undrain(self, replica_id: int, now: int) -> list[Event]:
        """As Scheduler.undrain."""
        events = self.core.undrain(replica_id, now)
        return self._noted(pb.Record(now_ns=now, undrain=replica_id), events)

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
        recorded = result_record(replica_id, result, self._records_tokens)
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

    def forget(self) -> None:
        """Forgets all inputs so far, as if the ring had been full: the core's state stands for them."""
        self._ring.forget(self._decisions.value)

    def dump(self, now: int) -> Iterator[bytes]:
        """The file, in pieces, as it is at this moment. Live sequences' blocks are in it as far as they are known."""
        self._forget_stays()
        name, oldest = self._pseudonyms.name, self._ring.oldest
        weights = {name(tenant): weight for tenant, weight in self.limits.tenant_weights.items()}
        header = pb.RecordingHeader(
            version=recording.VERSION,
            software=_software(),
            limits=recording.to_fields(replace(self.core.limits, tenant_weights=weights)),
            salt_id=self._pseudonyms.salt_id,
            has_tokens=self._records_tokens,
            num_dropped_records=oldest.first,
            defect=oldest.defect,
            decisions=oldest.decisions,
            replicas=[stay.replica for stay in self._stays.values() if stay.attached_at < oldest.first],
        )
        if oldest.state is not None:
            header.state = write(oldest.state, name, self._pseudonyms.block)
            requests = oldest.state.requests
            header.requests.extend(self._pseudonyms.request(request, has_tokens=False) for request in requests)
        contents = [record for sequence in self._live.values() for record in self._contents(sequence, now)]
        frames = [recording.frame(record.SerializeToString()) for record in contents]
        return recording.write(header, [*self._ring, *frames])

    # Inside ------------------------------------------------------------------------------------------------------

    def _forget_stays(self) -> None:
        """Of replicas that detached before the first record that is kept."""
        for replica_id, stay in tuple(self._stays.items()):
            if stay.detached_at is not None and stay.detached_at < self._ring.oldest.first:
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
                for record in self._contents(sequence, now) if sequence is not None else ():
                    self._note(record)

    def _note(self, record: pb.Record) -> None:
        record.decisions = self._decisions.value
        self._now = record.now_ns
        self._ring.append(recording.frame(record.SerializeToString()), self._decisions.value)

    def _contents(self, sequence: Sequence, now: int) -> Iterator[pb.Record]:
        for content in self._pseudonyms.contents(sequence):
            yield pb.Record(now_ns=now, decisions=self._decisions.value, content=content)


def _software() -> str:
    try:
        return version("octavo")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"
