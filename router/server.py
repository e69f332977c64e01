"""The router process: puts the parts together, loads the model's text, serves, drains, ends.

Both surfaces and the token socket share one event loop. HTTP answers from the first moment, so that readiness can be
asked while the start goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import socket
from collections.abc import AsyncIterator

import uvloop

from octavo.grpc_polling import let_polling_wait
from octavo.phases import Phases
from octavo.ports import address_towards
from octavo.process import Shutdown, StartError, in_thread
from octavo.sources import resolve
from octavo.tls import internal_channel_credentials
from octavo.tracing import make_tracer
from router.access.setup import Access, exposures
from router.browser.later import write_refusal
from router.browser.options import open_to_pages
from router.browser.setup import add_browser_doors
from router.config import RouterConfig
from router.front import FrontDoor, Helpers
from router.grpc_api import InferenceServicer, make_server, set_health
from router.http_server import CLOSING_S, listen, quiet_server
from router.metrics import RouterMetrics
from router.metrics_catalogue import DROPPED_MESSAGES, LIVE, READY, SCHEDULER_CONNECTED
from router.models.catalogue import Catalogue
from router.models.watch import ModelsWatch
from router.openai.app import make_app, make_health_app
from router.streams.scheduler_client import SchedulerClient
from router.streams.token_inlet import TokenInlet, is_every_address
from router.structured.checker import GrammarChecker
from router.text.model_text import ModelText, load_model_text
from router.traces import RequestTracer

_LOG = logging.getLogger(__name__)


def main(config: RouterConfig) -> int:
    """Serve until a signal; returns the exit status. Raises StartError and SourceError when it cannot start."""
    shutdown = Shutdown()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config, shutdown))
    finally:
        shutdown.close()
    return 0


def _advertised(config: RouterConfig) -> str | None:
    """Where workers send tokens to; None for the endpoint that is bound. Raises StartError."""
    if config.token_advertise is not None or not is_every_address(config.token_listen):
        return config.token_advertise
    try:
        host = address_towards(config.scheduler_address)
    except OSError as error:
        raise StartError(
            f"--scheduler-address {config.scheduler_address}: this machine's address on the way there is unknown "
            f"({error}); start the scheduler first, or say by --token-advertise where workers send tokens to"
        ) from None
    return f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*"


async def _serve(config: RouterConfig, shutdown: Shutdown) -> None:
    router = Router(config)
    asked = asyncio.create_task(shutdown.wait_async())
    try:
        starting = asyncio.create_task(router.start())
        await asyncio.wait({asked, starting}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()  # asked to end before there was anything to drain
            return
        await starting
        # What the start made stays: the collector of garbage need not look through it for every few thousand tokens.
        gc.collect()
        gc.freeze()
        names = ", ".join(router.front.catalogue.names)
        _LOG.info("serving %s: HTTP %s, gRPC %s", names, router.http_address, router.grpc_address)
        done, _ = await asyncio.wait({asked, *router.tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task  # a part that ended by itself ends the process with its cause
        await router.drain()
        _LOG.info("%s", router.metrics.totals())
    finally:
        asked.cancel()
        await router.stop()


class Router:
    """The running parts of one process."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.tasks: set[asyncio.Task[None]] = set()
        self._http_tasks: list[asyncio.Task[None]] = []
        self.phases = Phases()
        self.metrics = RouterMetrics(by_tenant=config.metrics_by_tenant)
        self.access = Access(config, self.metrics.refused)
        self.inlet = TokenInlet(config.token_listen, _advertised(config), curve=config.wants_curve(config.token_listen))
        self.scheduler = SchedulerClient(
            config.scheduler_address,
            self.inlet.endpoint,
            f"{socket.gethostname()}:{os.getpid()}",
            self.inlet.curve_public_key,
            internal_channel_credentials(config.internal_tls_cert, config.internal_tls_key, config.internal_tls_ca),
        )
        self.scheduler.on_change(lambda state: self.inlet.authorise(state.worker_curve_keys))
        self._tracer = make_tracer("octavo-router", config.otlp_endpoint, config.otlp_sampling_ratio)
        self.front = FrontDoor(
            Catalogue(config.name, *config.further_sources),
            self.scheduler,
            self.inlet,
            Helpers(
                self.metrics,
                None if self._tracer is None else RequestTracer(self._tracer, self.metrics.clock),
                self.access.admission,
                GrammarChecker(config.grammar_timeout),
            ),
            recovery_timeout_s=config.recovery_timeout,
            seed=config.seed,
        )
        self.metrics.set.on_scrape(self._show_state)
        self.front.own_phases = self.phases.snapshot
        self._grpc, self._health = make_server(
            self.front, config.max_message_bytes, self.access.gate, config.send_timeout
        )
        tls = self.access.tls
        self.app = make_app(self.front, config.max_message_bytes, self.access.gate, write_refusal)
        servicer = InferenceServicer(self.front, send_timeout_s=config.send_timeout)
        add_browser_doors(self.app, servicer, config, config.max_message_bytes)
        self._http = quiet_server(
            self.app, None if tls is None else tls.ssl_context, body_timeout_s=config.body_timeout
        )
        self._health_http = None if config.health_port is None else quiet_server(make_health_app(self.front), None)
        self._serving: bool | None = None
        self.http_port = self.grpc_port = self.health_port = 0

    async def start(self) -> None:
        """Bind, answer, and load. Raises StartError or SourceError."""
        for sentence in exposures(self.config, self.config.host, self.config.token_listen):
            _LOG.warning("open to the network: %s", sentence)
        for sentence in open_to_pages(self.config, asks_for_keys=self.config.asks_for_keys):
            _LOG.warning("open to web pages: %s", sentence)
        self._bind_grpc()
        listener = listen("--http-port", self.config.host, self.config.http_port, self.config.send_timeout)
        self.http_port = listener.getsockname()[1]
        self._http_tasks = [asyncio.create_task(self._http.serve(sockets=[listener]))]
        if self._health_http is not None:
            host = self.config.health_host or self.config.host
            listener = listen("--health-port", host, self.config.health_port or 0)
            self.health_port = listener.getsockname()[1]
            self._http_tasks.append(asyncio.create_task(self._health_http.serve(sockets=[listener])))
        await self._grpc.start()
        let_polling_wait()
        self.scheduler.on_change(lambda state: self._publish())
        parts = (self.scheduler.run(), self.inlet.run(), self.metrics.watch_loop(), self.access.refresh_loop())
        self.tasks |= {asyncio.create_task(part) for part in parts}
        for name, source in {self.config.name: self.config.model, **self.config.further_sources}.items():
            self.front.catalogue.add(await in_thread(functools.partial(self._load, name, source), "start"))
        if self.config.models is not None:
            watch = ModelsWatch(self.config.models, self.front.catalogue)
            put_in_place = await in_thread(watch.load, "start")
            put_in_place()
            self.tasks.add(asyncio.create_task(watch.run(self._publish)))
        self._publish()

    @property
    def http_address(self) -> str:
        return f"{_bracketed(self.config.host)}:{self.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"{_bracketed(self.config.host)}:{self.grpc_port}"

    async def drain(self) -> None:
        """Refuse what is new, finish what runs; what outlasts --drain-timeout is told so."""
        _LOG.info("draining %d requests", self.front.num_live)
        self.front.draining = True
        self._publish()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_timeout):
                return await self.front.wait_idle()
        _LOG.warning("%d requests have outlasted --drain-timeout and end with an error", self.front.num_live)
        self.front.end_all("this router is shutting down, and the request has outlasted its --drain-timeout; try again")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSING_S):  # who reads nothing hears no more
                await self.front.wait_idle()

    async def stop(self) -> None:
        """End every part, whatever still runs."""
        self._http.stop()
        if self._health_http is not None:
            self._health_http.stop()
        await self._grpc.stop(CLOSING_S if self.front.num_live else 0)
        await asyncio.gather(*self._http_tasks)
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.scheduler.close()
        self.inlet.close()
        await self.front.close()
        if self._tracer is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._tracer.close)

    def _show_state(self) -> None:
        """Bring into the metrics what is read and not counted."""
        number = self.metrics.set.number
        number(LIVE).set(self.front.num_live)
        number(READY).set(self.front.readiness().ready)
        number(SCHEDULER_CONNECTED).set(self.scheduler.state.connected)
        number(DROPPED_MESSAGES).set(self.inlet.num_dropped_messages)

    def _load(self, name: str, model: str) -> ModelText:
        with self.phases.phase("model"):
            source = resolve(model)
        with self.phases.phase("tokenizer"):
            return load_model_text(name, source.directory, self.config.tool_call_parser, self.config.reasoning_parser)

    def _bind_grpc(self) -> None:
        address = f"{_bracketed(self.config.host)}:{self.config.grpc_port}"
        try:
            self.grpc_port = (
                self._grpc.add_insecure_port(address)
                if self.access.tls is None
                else self._grpc.add_secure_port(address, self.access.tls.credentials())
            )
        except RuntimeError:
            raise StartError(f"--grpc-port: {address} cannot be bound; is it in use? Choose another port") from None

    def _publish(self) -> None:
        """Bring gRPC health up to date, and say in the log when readiness changes."""
        found = self.front.readiness()
        if found.ready == self._serving:
            return
        if found.ready:
            ready = [name for name, reason in found.reasons.items() if not reason]
            _LOG.info("ready: %s", ", ".join(ready))
        else:
            _LOG.info("not ready: %s", found.reason)
        self._serving = found.ready
        set_health(self._health, serving=found.ready)


@contextlib.asynccontextmanager
async def running(config: RouterConfig) -> AsyncIterator[Router]:
    """A started router, stopped on the way out."""
    router = Router(config)
    try:
        await router.start()
        yield router
    finally:
        await router.stop()


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
