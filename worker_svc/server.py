"""The worker process: attaches from its first moment, loads, serves steps, and ends when asked.

Only light modules are imported here; torch and everything that needs it come with the import phase, once the scheduler
can be told that it has begun.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from octavo.internal.v1 import scheduler_pb2, types_pb2, worker_pb2
from octavo.metrics import serve_metrics
from octavo.metrics_gpu import find_gpus
from octavo.phases import Abandoned, Phase, Phases
from octavo.process import Shutdown
from octavo.tls import internal_channel_credentials
from octavo.tracing import make_tracer
from worker_svc.attach import Inbox, SchedulerLink, Stop
from worker_svc.config import WorkerConfig
from worker_svc.follower import follow
from worker_svc.lean_torch import import_torch
from worker_svc.metrics import WorkerMetrics
from worker_svc.observers import Observer
from worker_svc.parallel.place import launched_place
from worker_svc.parallel.replica import Replica, replica_of
from worker_svc.process_memory import keep_freed_memory
from worker_svc.threads import limit_spinning
from worker_svc.traces import StepTraces

if TYPE_CHECKING:
    from worker_svc.engine import StepRunner
    from worker_svc.threads import StepThreads

_LOG = logging.getLogger(__name__)


class Loaded(Protocol):
    """A worker that can produce tokens, and what it says of itself."""

    @property
    def runner(self) -> StepRunner: ...

    @property
    def hello(self) -> worker_pb2.Hello: ...

    @property
    def threads(self) -> StepThreads | None: ...

    def close(self) -> None: ...


def main(config: WorkerConfig) -> int:
    """Runs a worker until SIGTERM or SIGINT; returns the exit status.

    Where a launcher made it another rank than 0 of its replica, it follows that one. Raises StartError, or what else
    went wrong, when it cannot start.
    """
    place = launched_place(os.environ, config.tensor_parallel_size)
    if place is not None and place.rank > 0:
        follow(config, place)
    name = f"{socket.gethostname()}:{os.getpid()}"
    replica = replica_of(config, os.environ)
    shutdown = Shutdown()
    inbox: Inbox = SimpleQueue()
    credentials = internal_channel_credentials(
        config.internal_tls_cert, config.internal_tls_key, config.internal_tls_ca
    )
    link = SchedulerLink(config.scheduler_address, inbox, credentials)
    threading.Thread(target=_stop_when_asked, args=(shutdown, inbox), name="shutdown", daemon=True).start()
    link.start()
    try:
        _serve(config, name, link, inbox, shutdown, replica)
    except Abandoned:
        _LOG.info("asked to end while starting")
    except RuntimeError:
        replica.await_blame()
        raise
    finally:
        replica.close()
        link.close()
        shutdown.close()
    return 0


def _serve(
    config: WorkerConfig, name: str, link: SchedulerLink, inbox: Inbox, shutdown: Shutdown, replica: Replica
) -> None:
    def report(phase: Phase) -> None:
        if shutdown.draining:
            raise Abandoned
        link.report(_starting(name, phase, phases.seconds))

    phases = Phases(report)
    limit_spinning(os.environ)
    keep_freed_memory()
    # What the start makes lives as long as the process: the collector would walk it again and again, for nothing.
    gc.disable()
    metrics = WorkerMetrics()
    metrics.set.on_scrape(lambda: metrics.show_phases(phases.snapshot()))
    scraped = serve_metrics(metrics.set, config.metrics_host, config.metrics_port)
    _LOG.info("metrics on http://%s:%d/metrics", config.metrics_host, scraped.port)
    tracer = make_tracer("octavo-worker", config.otlp_endpoint, config.otlp_sampling_ratio)
    with phases.phase("import"):
        from worker_svc.engine import Engine
        from worker_svc.token_outlet import TokenOutlet

        load = _loader(config, replica)
    loaded = load(config, phases)
    loaded.hello.name = name
    gc.freeze()
    gc.enable()
    _LOG.info("ready after %.2f s", phases.seconds)
    outlet = TokenOutlet()
    loaded.hello.curve_public_key = outlet.curve_public_key
    link.ready(loaded.hello)
    if (gpus := find_gpus()) is not None:
        metrics.set.on_scrape(lambda: gpus.read_into(metrics.set))
    observers: list[Observer] = [metrics.for_model(loaded.hello)]
    if tracer is not None:
        observers.append(StepTraces(tracer, name))
    try:
        Engine(replica.leading(loaded.runner), outlet, inbox, loaded.threads, observers).run(lambda: shutdown.draining)
    finally:
        outlet.close()
        loaded.close()
        _LOG.info("%s", metrics.totals())
        if tracer is not None:
            tracer.close()


def _loader(config: WorkerConfig, replica: Replica) -> Callable[[WorkerConfig, Phases], Loaded]:
    """What becomes of the model's files; importing the real one takes torch with it."""
    if config.simulate:
        from worker_svc.simulated import load_simulation

        return load_simulation
    import_torch()
    from worker_svc.loading import load

    return lambda config, phases: load(config, phases, replica.join(phases))


def _starting(name: str, phase: Phase, seconds: float) -> scheduler_pb2.WorkerStarting:
    unit = "ranks" if phase.name == "ranks" else "tensors"
    detail = "" if phase.total is None else f"{phase.done}/{phase.total} {unit}"
    return scheduler_pb2.WorkerStarting(
        name=name, phase=types_pb2.StartPhase(name=phase.name, detail=detail, seconds=seconds)
    )


def _stop_when_asked(shutdown: Shutdown, inbox: Inbox) -> None:
    shutdown.wait()
    inbox.put(Stop())
