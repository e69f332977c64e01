"""A rank other than 0 of a replica: loads its part of the model, then runs every plan that rank 0 runs.

It serves nobody and says nothing to the scheduler. It ends when rank 0 says so or is gone; signals that ask for an end
are rank 0's to heed, for this rank is needed until then. Torch comes with the import phase, as in `server.py`.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections import deque
from typing import TYPE_CHECKING, NoReturn

from octavo.logs import setup_logging
from octavo.phases import Phases
from octavo.process import Shutdown, StartError, say_last_words
from worker_svc.config import WorkerConfig
from worker_svc.lean_torch import import_torch
from worker_svc.parallel.links import OrderReceiver, connect
from worker_svc.parallel.place import RankPlace
from worker_svc.process_memory import keep_freed_memory
from worker_svc.threads import StepThreads, limit_spinning

if TYPE_CHECKING:
    from octavo.internal.v1 import ranks_pb2
    from worker_svc.engine import InFlight, StepRunner
    from worker_svc.loading import LoadedWorker
    from worker_svc.parallel.rendezvous import Rendezvous

_LOG = logging.getLogger(__name__)

# An operation on tensors fails when another rank dies; rank 0 is given so long to end this one before it blames itself.
_NOTICE_S = 5.0


def follow(config: WorkerConfig, place: RankPlace) -> NoReturn:
    """Runs the rank until its replica ends, which ends the process.

    Raises StartError, or what else went wrong, once rank 0 has been told.
    """
    setup_logging(f"worker r{place.rank}", config.log_level, config.log_format)
    Shutdown()  # the first signal is only noted
    limit_spinning(os.environ)
    keep_freed_memory()
    gc.disable()
    phases = Phases()
    with phases.phase("import"):
        import_torch()
        from worker_svc.loading import load
        from worker_svc.parallel.rendezvous import Rendezvous
    with phases.phase("ranks"):
        meeting = Rendezvous(place, config.rendezvous_timeout, None)
        receiver = _reach_first_rank(meeting, place, config.rendezvous_timeout)
    try:
        loaded = load(config, phases, meeting.membership(config))
        gc.freeze()
        gc.enable()
        _run(loaded, receiver)
    except Exception as error:
        if isinstance(error, RuntimeError):
            time.sleep(_NOTICE_S)
        receiver.fail(f"{error}" if isinstance(error, StartError) else f"{type(error).__name__}: {error}")
        raise


def _reach_first_rank(meeting: Rendezvous, place: RankPlace, timeout_s: float) -> OrderReceiver:
    address, secret = meeting.find()
    try:
        connection = connect(address, place.rank, secret, timeout_s)
    except OSError as error:
        raise StartError(
            f"rank {place.rank} cannot reach rank 0 at {address[0]}:{address[1]}: {error}; ranks need every port "
            "between their machines"
        ) from error

    def end(is_in_order: bool) -> None:
        if not is_in_order:
            say_last_words("octavo worker", f"rank {place.rank}: rank 0 is gone, and the replica with it")
        os._exit(0 if is_in_order else 1)

    return OrderReceiver(connection, end)


def _run(loaded: LoadedWorker, receiver: OrderReceiver) -> NoReturn:
    steps = FollowedSteps(loaded.runner, loaded.threads)
    for order in receiver.orders():
        match order.WhichOneof("order"):
            case "plan":
                steps.run(order)
            case "reset":
                steps.reset()
            case unknown:
                raise StartError(f"an order of kind {unknown} from rank 0: all ranks need the same release of octavo")
    raise AssertionError("orders have no end")


class FollowedSteps:
    """Rank 0's steps on this rank, of which only its rows and blocks change.

    Rank 0 settles a step when its device has done it, which is another moment on each rank. What a rank has settled
    decides which rows it runs, and ranks that run different rows wait for each other without end: so this one settles
    what rank 0 had settled, no more.
    """

    def __init__(self, runner: StepRunner, threads: StepThreads | None = None) -> None:
        self._runner = runner
        self._threads = threads
        # Steps that rank 0 was not known to have settled, by number.
        self._flights: deque[tuple[int, InFlight]] = deque()

    def reset(self) -> None:
        """As the runner's."""
        self._flights.clear()
        self._runner.reset()

    def run(self, order: ranks_pb2.RankOrder) -> None:
        """Runs the order's plan with what rank 0 knew when it sent it."""
        from worker_svc.rows import PlanError

        if self._threads is not None:
            self._threads.before_step()
        begun_s = time.perf_counter()
        try:
            while self._flights and self._flights[0][0] <= order.settled_step:
                self._flights.popleft()[1].result()
            self._flights.append((order.plan.step, self._runner.launch(order.plan)))
        except PlanError as error:
            _LOG.debug("step %d: %s; rank 0 finds the same and resets", order.plan.step, error)
            return
        if self._threads is not None:
            self._threads.after_step(time.perf_counter() - begun_s)
