"""The scheduler process of the simulation: real core, engine and service, thrown away whole when it crashes.

Knows how the process is put together and how calls find it. After every transition of the core its laws are checked.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from octavo.internal.v1 import scheduler_pb2 as pb
from scheduler_svc.core import laws
from scheduler_svc.core.plan import Planned, StepResult
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import CoreLimits, Event, ReplicaSpec, Request, Ticked
from scheduler_svc.engine import Engine
from scheduler_svc.operators import Operators, Unknown
from scheduler_svc.recorder import Recorder
from scheduler_svc.recording import read
from scheduler_svc.replay import replay
from scheduler_svc.service import SchedulerService
from tests.simulation.network import Call, Handler, Network


class CheckedScheduler(Scheduler):
    """The core, which looks after each transition whether its laws hold."""

    def submit(self, request: Request, now: int) -> list[Event]:
        return self._checked(super().submit(request, now))

    def cancel(self, sequence_id: int, now: int) -> list[Event]:
        return self._checked(super().cancel(sequence_id, now))

    def attach(self, replica: ReplicaSpec, now: int) -> list[Event]:
        return self._checked(super().attach(replica, now))

    def detach(self, replica_id: int, now: int) -> list[Event]:
        return self._checked(super().detach(replica_id, now))

    def complete(self, replica_id: int, result: StepResult, now: int) -> list[Event]:
        return self._checked(super().complete(replica_id, result, now))

    def update(
        self, sequence_id: int, now: int, *, priority: int | None = None, deadline_ns: int | None = None
    ) -> list[Event]:
        return self._checked(super().update(sequence_id, now, priority=priority, deadline_ns=deadline_ns))

    def drain(self, replica_id: int, now: int) -> list[Event]:
        return self._checked(super().drain(replica_id, now))

    def undrain(self, replica_id: int, now: int) -> list[Event]:
        return self._checked(super().undrain(replica_id, now))

    def plan(self, replica_id: int, now: int) -> Planned:
        planned = super().plan(replica_id, now)
        laws.check(self)
        return planned

    def tick(self, now: int) -> Ticked:
        ticked = super().tick(now)
        laws.check(self)
        return ticked

    def _checked(self, events: list[Event]) -> list[Event]:
        laws.check(self)
        return events


class SimulatedScheduler:
    """A scheduler process, up or down. Use it in a running loop."""

    def __init__(self, network: Network, limits: CoreLimits, forgetting: float) -> None:
        self._network, self._limits, self._forgetting = network, limits, forgetting
        self._ticker: asyncio.Task[None] | None = None
        self.core: CheckedScheduler | None = None
        """None while it is down."""
        self.num_starts = 0
        self.num_replayed_states = 0
        """Recordings that began in the middle of something and replayed identically."""

    def start(self) -> None:
        """A new process, which knows nothing."""
        self.num_starts += 1
        self.core = CheckedScheduler(self._limits)
        self.recorder = Recorder(self.core, salt=b"sixteen bytes...", max_bytes=10**8)
        loop = self._network.loop
        first_router_id = self._network.rng.getrandbits(48)
        self._engine = Engine(self.recorder, lambda: int(loop.time() * 1e9), first_router_id=first_router_id)
        self._service = SchedulerService(self._engine, ())
        self._ticker = loop.create_task(self._tick())
        self._network.trace.note("the scheduler starts")

    def check_recording(self) -> None:
        """What was recorded of this process must replay identically, also where the ring forgot the beginning."""
        recording = read(b"".join(self.recorder.dump(int(self._network.loop.time() * 1e9))))
        difference = replay(recording).difference
        assert difference is None, f"the replay decides otherwise: {difference}"
        self.num_replayed_states += bool(recording.header.requests)

    def crash(self) -> None:
        """Its state is gone; its connections break."""
        self.check_recording()
        self._network.trace.note("the scheduler dies")
        self.core = None
        if self._ticker is not None:
            self._ticker.cancel()
        for call in list(self._network.calls):
            call.lose_server()

    def reset_prefix_cache(self) -> None:
        """What an operator may do at any time."""
        if self.core is not None:
            self._engine.reset_prefix_cache()
            laws.check(self.core)

    def drain(self, name: str) -> None:
        """A replica takes nothing new, if it is attached."""
        with contextlib.suppress(Unknown):
            self._operators().drain(name)

    def undrain(self, name: str) -> None:
        """It serves again."""
        with contextlib.suppress(Unknown):
            self._operators().undrain(name)

    def update(self, request_id: str, priority: int) -> None:
        """A request becomes more or less urgent, if it is live here."""
        with contextlib.suppress(Unknown):
            self._operators().update(pb.SequenceName(request_id=request_id), priority, None)

    def _operators(self) -> Operators:
        if self.core is None:
            raise Unknown("the scheduler is down")
        return Operators(self._engine)

    # What clients open.

    def watch(self, name: str, request: pb.WatchRequest) -> Call:
        return self._open(f"{name} Watch", lambda _, context: self._service.Watch(request, context))

    def generate(self, name: str, request: pb.GenerateRequest) -> Call:
        asked = pb.GenerateRequest.FromString(request.SerializeToString())
        return self._open(f"{name} Generate", lambda _, context: self._service.Generate(asked, context))

    def attach(self, name: str) -> Call:
        return self._open(f"{name} Attach", lambda requests, context: self._service.Attach(requests, context))

    def _open(self, name: str, handler: Any) -> Call:
        def lookup() -> Handler | None:
            return None if self.core is None else handler

        return Call(self._network, name, lookup)

    async def _tick(self) -> None:
        while True:
            for _ in range(20):
                await asyncio.sleep(0.05)
                if self._network.rng.random() < self._forgetting:
                    self.recorder.forget()
            self._engine.tick()
