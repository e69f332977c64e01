"""What operators may ask and do, by the names they know: request ids, replica names.

Knows the engine, and the wire as far as answers go. Decides nothing: each act is one of the core's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from octavo.internal.v1 import scheduler_pb2 as pb
from scheduler_svc import wire
from scheduler_svc.control_wire import explanation_to_wire, statistics_to_wire
from scheduler_svc.engine import Engine
from scheduler_svc.parties import Call, Replica
from scheduler_svc.recorder import Recorder

_LOG = logging.getLogger(__name__)


_REMEDY = "give the x-request-id of its answer, or the # and number that `octavo ctl explain` shows"


class Unknown(LookupError):
    """Nothing goes by that name; the message says what was looked for, and where."""


class Operators:
    """Questions and acts."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def load(self) -> pb.GetStatisticsResponse:
        """Everything at a glance."""
        engine = self._engine
        load = statistics_to_wire(engine.core.statistics(), engine.stalled(), engine.now())
        load.num_routers = engine.num_routers
        load.starting.extend(engine.served.starting)
        for message, replica in zip(load.replicas, engine.replicas.values(), strict=True):
            message.block_size = replica.hello.block_size
        return load

    def explain(self, name: pb.SequenceName) -> list[pb.SequenceExplanation]:
        """What was decided about sequences: live ones first, then remembered ones. Raises Unknown if there are none."""
        engine = self._engine
        if name.HasField("sequence_id"):
            ids = [name.sequence_id]
        else:
            ids = [call.sequence_id for call in engine.calls.live.values() if call.request_id == name.request_id]
            ids += [ended for ended, request_id in engine.calls.ended_names.items() if request_id == name.request_id]
        found = [explanation for each in ids if (explanation := engine.core.explain(each)) is not None]
        if not found:
            raise Unknown(f"{_shown(name)} is neither live nor among the latest that ended; {_REMEDY}")
        names, now = {each: replica.hello.name for each, replica in engine.replicas.items()}, engine.now()
        return [explanation_to_wire(explanation, names, now) for explanation in found]

    def update(self, name: pb.SequenceName, priority: int | None, deadline_ns: int | None) -> list[int]:
        """Changes live sequences' priority or deadline; None leaves it. Their ids. Raises Unknown if there are none."""
        engine, calls = self._engine, self._live(name)
        for call in calls:
            events = engine.core.update(call.sequence_id, engine.now(), priority=priority, deadline_ns=deadline_ns)
            engine.settle(events)
        return [call.sequence_id for call in calls]

    def cancel(self, name: pb.SequenceName) -> list[int]:
        """Ends live sequences with a final status. Their ids. Raises Unknown if there are none."""
        calls = self._live(name)
        for call in calls:
            self._engine.cancel(call)
            call.events.put_nowait(wire.CANCELLED_BY_OPERATOR)
        return [call.sequence_id for call in calls]

    def drain(self, name: str) -> int:
        """Lets a replica take no new sequences; how many run there. Raises Unknown, naming those there are."""
        engine, replica = self._engine, self._replica(name)
        _LOG.info("replica %s drains", name)
        engine.settle(engine.core.drain(replica.replica_id, engine.now()), replica)
        engine.note_attached(replica)
        return self._num_running(replica)

    def undrain(self, name: str) -> int:
        """Lets a replica take sequences again; how many run there. Raises Unknown, naming those there are."""
        engine, replica = self._engine, self._replica(name)
        _LOG.info("replica %s serves again", name)
        engine.settle(engine.core.undrain(replica.replica_id, engine.now()), replica)
        engine.note_attached(replica)
        return self._num_running(replica)

    def reset_prefix_cache(self) -> int:
        """Forgets cached prefixes that no running sequence holds; how many blocks."""
        return self._engine.reset_prefix_cache()

    def dump(self) -> Iterator[bytes] | None:
        """The flight recorder's file in pieces; None when nothing is recorded."""
        core = self._engine.core
        return core.dump(self._engine.now()) if isinstance(core, Recorder) else None

    def aliases(self) -> Sequence[pb.Alias]:
        """Those that were set here."""
        return self._engine.served.aliases.table.aliases

    def set_alias(self, alias: pb.Alias) -> int:
        """Sets an alias on every router; how many there are. Raises BadAlias."""
        served = self._engine.served
        served.aliases.set(alias, served.models)
        served.wake_watchers()
        return self._engine.num_routers

    def remove_alias(self, name: str) -> int:
        """Takes an alias back from every router; how many there are. Raises Unknown, naming those there are."""
        served = self._engine.served
        if not served.aliases.remove(name):
            names = ", ".join(alias.name for alias in self.aliases()) or "none"
            raise Unknown(
                f"no alias {name!r} was set here; there are {names}. Those of a router's own file are changed there"
            )
        served.wake_watchers()
        return self._engine.num_routers

    def _replica(self, name: str) -> Replica:
        replicas = self._engine.replicas.values()
        for replica in replicas:
            if replica.hello.name == name:
                return replica
        names = ", ".join(replica.hello.name for replica in replicas) or "none"
        raise Unknown(f"no replica is called {name!r}; attached are {names}")

    def _num_running(self, replica: Replica) -> int:
        running = {each.replica_id: each.num_running for each in self._engine.core.statistics().replicas}
        return running[replica.replica_id]

    def _live(self, name: pb.SequenceName) -> list[Call]:
        calls = self._engine.calls.live
        if name.HasField("sequence_id"):
            found = [calls[name.sequence_id]] if name.sequence_id in calls else []
        else:
            found = [call for call in calls.values() if call.request_id == name.request_id]
        if not found:
            raise Unknown(f"{_shown(name)} is not live; {_REMEDY}")
        return found


def _shown(name: pb.SequenceName) -> str:
    return f"sequence {name.sequence_id}" if name.HasField("sequence_id") else f"request {name.request_id!r}"
