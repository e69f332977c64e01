"""The scheduler process: assembles core, engine and services, serves until told to stop.

Knows the config and how a process lives and dies. Decides nothing about sequences.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import secrets
import time
from collections.abc import Coroutine, Iterable, Iterator
from typing import Any

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from octavo.addresses import grpc_address
from octavo.grpc_health import Health
from octavo.grpc_polling import let_polling_wait
from octavo.internal.v1 import scheduler_pb2, scheduler_pb2_grpc
from octavo.keepalive import keepalive_options
from octavo.metrics import serve_metrics
from octavo.process import Shutdown, StartError
from octavo.tracing import make_tracer
from scheduler_svc.access import RoleGate, exposures, listen, refreshing, server_tls
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.control import ControlService
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine import Engine
from scheduler_svc.limits import core_limits as core_limits
from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.recorder import Recorder
from scheduler_svc.service import Networks, SchedulerService
from scheduler_svc.traces import QueueTraces
from scheduler_svc.watch import Watch, call_in

_LOG = logging.getLogger(__name__)

_CHANNEL_OPTIONS = (
    ("grpc.so_reuseport", 0),
    # Admissions carry whole prompts, and one plan may hold many.
    ("grpc.max_receive_message_length", 256 * 2**20),
    ("grpc.max_send_message_length", 256 * 2**20),
    # Peers that ping every ten seconds, also without calls, are welcome.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # Under load an answer takes long.
    *keepalive_options(interval_s=20, timeout_s=20),
)

# Longest that calls which were told to end may take for it.
_GOODBYE_S = 1.0


def main(config: SchedulerConfig) -> int:
    """Runs the scheduler until a signal; returns the exit status. Raises StartError when it cannot listen."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config))


async def _serve(config: SchedulerConfig) -> int:
    shutdown = Shutdown()
    core, first_router_id = recorded_core(config), secrets.randbits(48)
    tracer = make_tracer("octavo-scheduler", config.otlp_endpoint, config.otlp_sampling_ratio)
    metrics = SchedulerMetrics(call_in(asyncio.get_running_loop()))
    observers = (metrics,) if tracer is None else (metrics, QueueTraces(tracer))
    engine = Engine(
        core,
        time.monotonic_ns,
        first_router_id=first_router_id,
        check_laws=config.check_laws,
        observers=observers,
    )
    watch = Watch(engine, metrics, config.stats_interval)
    metrics.set.on_scrape(watch.read)
    tls = server_tls(config)
    server = grpc.aio.server(options=_CHANNEL_OPTIONS, interceptors=() if tls is None else (RoleGate(),))
    service = add_services(server, engine, token_networks(config))
    for sentence in exposures(config):
        _LOG.warning("open to the network: %s", sentence)
    port = listen(server, config, tls)
    scraped = serve_metrics(metrics.set, config.metrics_host, config.metrics_port)
    await server.start()
    let_polling_wait()
    address = grpc_address(config.host, port)
    _LOG.info("ready on %s; metrics on http://%s:%d/metrics", address, config.metrics_host, scraped.port)
    try:
        with _running(watch.progress(), watch.load(), refreshing(tls)) as parts:
            await until_asked(shutdown.wait_async(), parts)
    finally:
        # Nothing is lost by a stop: routers hold what they need to resubmit, workers attach anew.
        service.close()
        await server.stop(grace=_GOODBYE_S)
    _LOG.info("%s", watch.totals())
    if tracer is not None:
        await asyncio.to_thread(tracer.close)
    return 0


def recorded_core(config: SchedulerConfig) -> Scheduler | Recorder:
    """The core, behind a flight recorder unless its size is 0."""
    core = Scheduler(core_limits(config))
    if config.flight_recorder_size == 0:
        return core
    return Recorder(
        core,
        salt=secrets.token_bytes(16),
        max_bytes=config.flight_recorder_size,
        record_tokens=config.record_tokens,
    )


def token_networks(config: SchedulerConfig) -> Networks:
    """The networks of --token-networks. Raises StartError naming a bad one."""
    words = [word.strip() for word in config.token_networks.split(",") if word.strip()]
    try:
        return [ipaddress.ip_network(word) for word in words]
    except ValueError as error:
        raise StartError(f"--token-networks: {error}; write networks as 10.0.0.0/8,fd00::/8") from error


def add_services(server: grpc.aio.Server, engine: Engine, networks: Networks) -> SchedulerService:
    """Puts everything that the scheduler offers on a server; returns the service whose calls are long."""
    service = SchedulerService(engine, networks)
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(service, server)
    scheduler_pb2_grpc.add_ControlServiceServicer_to_server(ControlService(engine), server)
    names = [descriptor.full_name for descriptor in scheduler_pb2.DESCRIPTOR.services_by_name.values()]
    checks = Health()
    for name in ("", *names):
        checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return service


async def until_asked(asked: Coroutine[Any, Any, None], parts: Iterable[asyncio.Task[None]]) -> None:
    """Returns when the process is asked to end. Raises what a part fails with: others would wait for it for ever."""
    waiting = asyncio.create_task(asked)
    pending = {waiting, *parts}
    try:
        while not waiting.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task
    finally:
        waiting.cancel()


@contextlib.contextmanager
def _running(*parts: Coroutine[Any, Any, None]) -> Iterator[list[asyncio.Task[None]]]:
    """Tasks that live as long as the block."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
