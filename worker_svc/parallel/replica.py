"""The replica that a worker process leads: itself alone, or the ranks that it starts or that a launcher has started.

Both kinds are used alike: `join` gives the membership to load with, `leading` the runner that takes plans, `close` ends
it. Torch is imported by `join` and not before.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from octavo.internal.v1 import ranks_pb2, worker_pb2
from octavo.phases import Phases
from octavo.process import say_last_words
from worker_svc.config import WorkerConfig
from worker_svc.parallel.links import Loss, OrderSender
from worker_svc.parallel.local_ranks import LocalRanks
from worker_svc.parallel.place import RankPlace, launched_place
from worker_svc.parallel.sockets import listen

if TYPE_CHECKING:
    from worker_svc.engine import InFlight, StepRunner
    from worker_svc.outcome import StepOutcome
    from worker_svc.parallel.group import Membership

_LOG = logging.getLogger(__name__)

# A death ends both what an operation on tensors waits for and a connection, whose watcher is given so long to notice.
_NOTICE_S = 3.0
_LOOPBACK = "127.0.0.1"


class Replica(Protocol):
    """What holds the model, seen from the process that attaches for it."""

    def join(self, phases: Phases) -> Membership:
        """Meets the other ranks. Raises StartError when they do not come."""
        ...

    def leading(self, runner: StepRunner) -> StepRunner:
        """This rank's runner, with which the other ranks go along."""
        ...

    def await_blame(self) -> None:
        """After an error of tensor operations: if another rank's death is behind it, this process ends saying so."""
        ...

    def close(self) -> None:
        """Ends the other ranks."""
        ...


class SoleReplica:
    """This process alone."""

    def join(self, phases: Phases) -> Membership:
        from worker_svc.parallel.group import ALONE

        return ALONE

    def leading(self, runner: StepRunner) -> StepRunner:
        return runner

    def await_blame(self) -> None:
        pass

    def close(self) -> None:
        pass


class LedReplica:
    """Rank 0 of a tensor-parallel group. The death of another rank ends this process, with its cause as last words."""

    def __init__(
        self, place: RankPlace, config: WorkerConfig, listener: socket.socket | None, local: LocalRanks | None
    ) -> None:
        """`local` are the ranks that were started here, `listener` the socket whose port they were told."""
        self._place = place
        self._config = config
        self._timeout_s = config.rendezvous_timeout
        self._listener = listener
        self._local = local
        self._sender: OrderSender | None = None
        self._has_lost = threading.Event()

    def join(self, phases: Phases) -> Membership:
        from worker_svc.parallel.rendezvous import Rendezvous

        with phases.phase("ranks", total=self._place.num_ranks) as advance:
            meeting = Rendezvous(self._place, self._timeout_s, self._listener)
            sender = OrderSender(listen(self._place.master_address, 0), self._place.num_ranks, self._end)
            self._sender = sender
            meeting.publish(sender.port, sender.secret)

            def check() -> None:
                advance(sender.num_arrived)
                if self._local is not None:
                    self._local.check()

            sender.accept_all(self._timeout_s, check)
            advance(sender.num_arrived)
            return meeting.membership(self._config)

    def leading(self, runner: StepRunner) -> StepRunner:
        assert self._sender is not None, "the ranks have not met"
        return LeadingRunner(runner, self._sender)

    def await_blame(self) -> None:
        if self._has_lost.wait(_NOTICE_S):
            threading.Event().wait()  # `_end` ends the process

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        if self._local is not None:
            self._local.end()

    def _end(self, loss: Loss) -> None:
        """Ends this process: the step thread may wait for the lost rank in an operation that nothing interrupts."""
        self._has_lost.set()
        if loss.cause is not None:
            why = f"{loss.who}: {loss.cause}"
        elif self._local is not None:
            why = f"{loss.who} {self._local.ending(loss.who.rank)}"
        else:
            why = f"{loss.who} has closed its connection; see its log"
        if self._local is not None:
            self._local.kill()
        say_last_words("octavo worker", f"{why}; a replica ends with the first of its {self._place.num_ranks} ranks")
        os._exit(1)


class LeadingRunner:
    """Rank 0's runner: the other ranks are told each plan before it runs here, and what was settled by then."""

    def __init__(self, runner: StepRunner, sender: OrderSender) -> None:
        self._runner = runner
        self._sender = sender
        # The last step whose outcome was asked for: what the runner settles by itself, the others' settle alike.
        self._settled_step = 0

    @property
    def num_live_rows(self) -> int:
        return self._runner.num_live_rows

    def reset(self) -> None:
        self._sender.send(ranks_pb2.RankOrder(reset=True))
        self._runner.reset()
        self._settled_step = 0

    def launch(self, plan: worker_pb2.StepPlan) -> InFlight:
        self._sender.send(ranks_pb2.RankOrder(plan=plan, settled_step=self._settled_step))
        return _LedStep(self._runner.launch(plan), lambda: self._settle(plan.step))

    def _settle(self, step: int) -> None:
        self._settled_step = max(self._settled_step, step)


class _LedStep:
    """A step whose settling the other ranks are told of."""

    def __init__(self, flight: InFlight, settled: Callable[[], None]) -> None:
        self._flight = flight
        self._settled = settled

    def is_done(self) -> bool:
        return self._flight.is_done()

    def result(self) -> StepOutcome:
        outcome = self._flight.result()
        self._settled()
        return outcome


def replica_of(config: WorkerConfig, environment: Mapping[str, str]) -> Replica:
    """What this process, which is no other's rank, leads. Ranks that nobody else starts are started here."""
    if config.simulate:
        return SoleReplica()
    if (place := launched_place(environment, config.tensor_parallel_size)) is not None:
        return LedReplica(place, config, None, None)
    num_ranks = config.tensor_parallel_size
    if num_ranks == 1:
        return SoleReplica()
    listener = listen(_LOOPBACK, 0)
    port = int(listener.getsockname()[1])
    place = RankPlace(0, num_ranks, 0, num_ranks, _LOOPBACK, port)
    return LedReplica(place, config, listener, LocalRanks(config, place))
