"""The core's surroundings inside the process: the clock, who waits for which events, and when to plan.

Single-threaded, on one asyncio loop. Knows the core, routers, replicas and their outboxes. Knows no gRPC: `service.py`
puts these objects on the wire. Every decision is the core's; the engine delivers inputs and events, and plans after
each input.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from octavo.internal.v1 import scheduler_pb2 as pb
from octavo.internal.v1 import worker_pb2 as worker_pb
from scheduler_svc import wire
from scheduler_svc.calls import Calls
from scheduler_svc.core import laws
from scheduler_svc.core.limits import CoreLimits, PreemptionMode
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import Ended, Event, Finished, Preempted
from scheduler_svc.losses import Losses
from scheduler_svc.observers import Observer
from scheduler_svc.parties import Call, Replica, Router, UnknownRouter
from scheduler_svc.recorder import Recorder
from scheduler_svc.served import Served, refuse_other_model

_LOG = logging.getLogger(__name__)


class Engine:
    """Owns the core and everything attached to it."""

    def __init__(
        self,
        core: Scheduler | Recorder,
        clock: Callable[[], int],
        *,
        first_router_id: int = 1,
        check_laws: bool = False,
        observers: Sequence[Observer] = (),
    ) -> None:
        """`core` may be one whose inputs are recorded. `first_router_id` differs from start to start: an id that an
        earlier process gave is nobody's in this one."""
        self._core = core
        self._scheduler = core.core if isinstance(core, Recorder) else core
        self._clock = clock
        self._check_laws = check_laws
        self._observers = tuple(observers)
        self._ids = itertools.count(1)
        self._router_ids = itertools.count(first_router_id)
        self._routers: dict[int, Router] = {}
        self._replicas: dict[int, Replica] = {}
        self.served = Served()
        """What routers are told."""
        self._calls = Calls(self._scheduler.limits.max_explained)
        self._losses = Losses()
        self._due: dict[int, None] = {}

    @property
    def limits(self) -> CoreLimits:
        """The core's."""
        return self._scheduler.limits

    @property
    def core(self) -> Scheduler | Recorder:
        """The core, for those who look in; what changes it goes through `settle` with its events."""
        return self._core

    @property
    def calls(self) -> Calls:
        """Of live sequences."""
        return self._calls

    @property
    def replicas(self) -> Mapping[int, Replica]:
        """Attached ones, by id."""
        return self._replicas

    @property
    def num_routers(self) -> int:
        """Registered ones."""
        return len(self._routers)

    def now(self) -> int:
        """The clock's time."""
        return self._clock()

    def close(self) -> None:
        """The process ends: every call is told, and watchers are woken to see it."""
        for call in tuple(self._calls.live.values()):
            call.events.put_nowait(wire.SHUTTING_DOWN)
        self.served.wake_watchers()

    # Routers

    def register_router(self, endpoint: str, curve_public_key: str, name: str) -> Router:
        """A router has opened Watch; workers learn its endpoint before any plan that names it."""
        router_id = next(self._router_ids)
        message = worker_pb.RouterEndpoint(router_id=router_id, endpoint=endpoint, curve_public_key=curve_public_key)
        router = self._routers[router_id] = Router(router_id, name, message)
        _LOG.info("router %s registered as %d, tokens to %s", name, router_id, endpoint)
        self._broadcast(pb.AttachResponse(router_endpoint=message))
        return router

    def unregister_router(self, router: Router) -> None:
        """Its Watch has ended. Calls that still name it end too: workers are about to forget where its tokens go."""
        del self._routers[router.router_id]
        _LOG.info("router %s (%d) is gone", router.name, router.router_id)
        for call in self._calls.of_router(router.router_id):
            self.cancel(call)
            call.events.put_nowait(wire.ROUTER_GONE)
        self._broadcast(pb.AttachResponse(router_gone=router.router_id))

    # Sequences

    def submit(self, message: pb.GenerateRequest, traceparent: str = "") -> Call:
        """A new attempt at a sequence, traced where a span is named. Raises Refused or UnknownRouter; then nothing has
        changed."""
        if message.router_id not in self._routers:
            raise UnknownRouter(f"router_id {message.router_id} is not registered; open Watch and use the id it gives")
        self.served.check(message)
        sequence_id = next(self._ids)
        request = wire.request_from_wire(message, sequence_id)
        if request.crash_group_sizes:
            crashes = self._losses.crashes(request.stream_key, request.crash_group_sizes)
            request = replace(request, crash_group_sizes=crashes)
        call = self._calls.open(sequence_id, message, traceparent)
        try:
            events = self._core.submit(request, self._clock())
        except BaseException:
            self._calls.take_back(call)
            raise
        for observer in self._observers:
            observer.accepted(call)
        self.settle(events)
        return call

    def cancel(self, call: Call) -> None:
        """The caller is gone; does nothing for a sequence that has ended."""
        if self._calls.end(call.sequence_id) is not None:
            events = self._core.cancel(call.sequence_id, self._clock())
            self._show(events, call)
            self.settle(events)

    # Workers

    def attach(self, hello: worker_pb.Hello) -> Replica:
        """A worker is ready. Raises ValueError when it cannot serve beside the replicas there are."""
        refuse_other_model(hello, self._replicas.values())
        replica = Replica(next(self._ids), hello)
        spec = wire.replica_from_wire(hello, replica.replica_id)
        events = self._core.attach(spec, self._clock())
        self._replicas[replica.replica_id] = replica
        self._losses.note_attached(hello.process)
        for router in self._routers.values():
            replica.outbox.put_nowait(pb.AttachResponse(router_endpoint=router.endpoint))
        _LOG.info("replica %s attached: %s", hello.name, replica.sizes)
        if self.limits.preemption_mode is PreemptionMode.SWAP and not hello.num_host_blocks:
            _LOG.warning("replica %s has no --swap-space: what it preempts is computed again, not swapped", hello.name)
        self.served.add(hello)
        self.note_attached(replica)
        self.settle(events)
        return replica

    def detach(self, replica: Replica, cause: str) -> None:
        """Its connection has ended; its sequences end with a retriable status. Does nothing the second time."""
        if self._replicas.pop(replica.replica_id, None) is None:
            return
        _LOG.warning("replica %s detached: %s", replica.hello.name, cause)
        if self._observers:
            self._show_last_words(replica)
        events = self._core.detach(replica.replica_id, self._clock())
        self._losses.note_lost(replica.hello.process, self._calls.in_flight(events))
        self.note_attached(replica)
        self.settle(events, replica)

    def take_result(self, replica: Replica, message: worker_pb.StepResult) -> None:
        """A step is done. Raises ResultMismatch when it answers no plan of this replica."""
        now = self._clock()
        events = self._core.complete(replica.replica_id, wire.result_from_wire(message), now)
        replica.note_step(now)
        # At once: one more turn of the loop costs as much as the plan.
        planned = self._send_plans(replica)
        self._deliver(events, None)
        self._deliver(planned, replica)
        if self._scheduler.room.num_waiting or self._check_laws:
            self._plan_soon((replica,))  # for others, which what waits may suit better now

    # What time and operators bring

    def reset_prefix_cache(self) -> int:
        """Forgets cached prefixes that no running sequence holds; how many blocks."""
        return self._core.reset_prefix_cache()

    def stalled(self) -> set[int]:
        """Replicas that have completed no step for too long."""
        return {replica.replica_id for replica in self._replicas.values() if replica.stalled}

    def tick(self) -> None:
        """What time alone brings about, and advice for the log. Called once a second."""
        ticked = self._core.tick(self._clock())
        for line in ticked.advice:
            _LOG.warning("%s", line)
        self.settle(ticked.events)
        self.check_progress()

    def check_progress(self) -> None:
        """Marks replicas as stalled or recovered."""
        now = self._clock()
        for replica in self._replicas.values():
            planned = self._scheduler.replicas[replica.replica_id]
            if replica.is_stalled(now, planned.predict_step_ns(replica.hello.warm_up_token_ns)) != replica.stalled:
                replica.stalled = not replica.stalled
                state = "has completed no step for too long" if replica.stalled else "completes steps again"
                _LOG.warning("replica %s %s", replica.hello.name, state)
                self.note_attached(replica)

    def note_attached(self, replica: Replica) -> None:
        """Tells routers how many replicas of its model can take a sequence now."""
        draining = {each.spec.replica_id for each in self._scheduler.replicas.values() if each.is_draining}
        self.served.note_attached(replica.hello.model.name, self._replicas.values(), draining)

    # Inside

    def settle(self, events: Iterable[Event], source: Replica | None = None) -> None:
        """Delivers events, and plans for everybody once this turn of the loop is over. `source`: whence they come."""
        self._deliver(events, source)
        self._plan_soon(self._replicas.values())

    def _plan_soon(self, replicas: Iterable[Replica]) -> None:
        if not self._due:
            # Whatever else this turn of the loop brings is in the same plans.
            asyncio.get_running_loop().call_soon(self._plan_due)
        self._due.update(dict.fromkeys(replica.replica_id for replica in replicas))

    def _plan_due(self) -> None:
        """Plans for those whose work has changed. Where sequences wait, any replica of their model may be the one."""
        due, self._due = self._due, {}
        waiting = {model for model, num in self._scheduler.room.lengths().items() if num}
        for replica in tuple(self._replicas.values()):
            if replica.replica_id in due or replica.hello.model.name in waiting:
                self._deliver(self._send_plans(replica), replica)
        if self._check_laws:
            laws.check(self._scheduler)

    def _send_plans(self, replica: Replica) -> list[Event]:
        """Sends what may be computed now; returns what calls are to be told of it, which a worker need not wait for."""
        events: list[Event] = []
        while len(replica.sent_ns) < self.limits.max_unanswered_plans:
            now = self._clock()
            planned = self._core.plan(replica.replica_id, now)
            events += planned.events
            if planned.plan is None:
                break
            replica.sent_ns.append(now)
            message = wire.plan_to_wire(planned.plan)
            for admission, admitted in zip(planned.plan.admissions, message.admissions, strict=True):
                call = self._calls.live.get(admission.sequence_id)
                admitted.traceparent = call.traceparent if call is not None else ""
            replica.outbox.put_nowait(pb.AttachResponse(plan=message))
        return events

    def _deliver(self, events: Iterable[Event], replica: Replica | None) -> None:
        """Hands events to their calls; `replica` is the one that they come from."""
        hello = replica.hello if replica is not None else None
        for event in events:
            call = self._calls.live.get(event.sequence_id)
            if isinstance(event, Preempted):
                self._warn_of_preemption(event, call)
            if call is None:
                continue
            self._show((event,), call)
            if isinstance(event, Ended | Finished):
                self._calls.end(event.sequence_id)
            call.events.put_nowait(wire.event_to_wire(event, hello))

    def _show(self, events: Iterable[Event], call: Call) -> None:
        for event in events:
            for observer in self._observers:
                observer.saw(event, call)

    def _show_last_words(self, replica: Replica) -> None:
        for statistics in self._scheduler.statistics().replicas:
            if statistics.replica_id == replica.replica_id:
                for observer in self._observers:
                    observer.leaving(statistics)

    def _warn_of_preemption(self, event: Preempted, call: Call | None) -> None:
        request_id = call.request_id if call is not None else "?"
        _LOG.warning(
            "preempted request %s: %s; it gave back %d blocks",
            request_id,
            event.reason,
            event.num_blocks,
            extra={"request_id": request_id},
        )

    def _broadcast(self, message: pb.AttachResponse) -> None:
        for replica in self._replicas.values():
            replica.outbox.put_nowait(message)
