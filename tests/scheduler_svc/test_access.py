"""Who may talk to the scheduler: certificates and their roles, unix sockets, and what a start warns of."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.internal.v1 import scheduler_pb2 as pb
from octavo.internal.v1 import scheduler_pb2_grpc as pb_grpc
from octavo.options import OptionError
from octavo.process import StartError
from octavo.tls import internal_channel_credentials
from router.streams.scheduler_client import SchedulerClient
from scheduler_svc.access import RoleGate, exposures, listen, server_tls
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import CoreLimits
from scheduler_svc.engine import Engine
from scheduler_svc.server import add_services
from tests.fakes.certificates import Authority, Issued
from tests.scheduler_svc.harness import ENDPOINT, Clock, hello, run
from worker_svc.attach import Inbox, SchedulerLink
from worker_svc.config import WorkerConfig

PERMISSION_DENIED, UNAVAILABLE = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@contextlib.asynccontextmanager
async def listening(config: SchedulerConfig) -> AsyncIterator[tuple[Engine, str]]:
    """A scheduler that listens as its options say, and the address to dial."""
    engine = Engine(Scheduler(CoreLimits()), Clock(), first_router_id=100, check_laws=True)
    tls = server_tls(config)
    server = grpc.aio.server(interceptors=() if tls is None else (RoleGate(),))
    add_services(server, engine, ())
    port = listen(server, config, tls)
    await server.start()
    try:
        yield engine, config.host if config.host.startswith("unix:") else f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=0)


def secured(authority: Authority) -> SchedulerConfig:
    files = authority.issue("scheduler")
    return SchedulerConfig(
        port=0, internal_tls_cert=files.cert, internal_tls_key=files.key, internal_tls_ca=authority.ca
    )


def shown(authority: Authority, files: Issued | None) -> grpc.ChannelCredentials:
    if files is None:
        return grpc.ssl_channel_credentials(Path(authority.ca).read_bytes())
    credentials = internal_channel_credentials(files.cert, files.key, authority.ca)
    assert credentials is not None
    return credentials


async def statuses(address: str, credentials: grpc.ChannelCredentials | None) -> dict[str, grpc.StatusCode | None]:
    """How a call of each role ends; None for one that is let in."""
    if credentials is None:
        channel: Any = grpc.aio.insecure_channel(address)
    else:
        channel = grpc.aio.secure_channel(address, credentials)
    async with channel:
        stub: Any = pb_grpc.SchedulerServiceStub(channel)
        control: Any = pb_grpc.ControlServiceStub(channel)
        calls = {
            "router": stub.Watch(pb.WatchRequest(token_endpoint=ENDPOINT, name="r")),
            "worker": stub.Attach(),
            "operator": control.ListReplicas(pb.ListReplicasRequest()),
        }
        with contextlib.suppress(grpc.aio.AioRpcError):  # the call may have been ended already
            await calls["worker"].write(pb.AttachRequest(hello=hello()))
        found: dict[str, grpc.StatusCode | None] = {}
        for role, call in calls.items():
            try:
                await (call if role == "operator" else call.read())
                found[role] = None
            except grpc.aio.AioRpcError as error:
                found[role] = error.code()
            call.cancel()
        return found


@pytest.mark.parametrize(
    ("names", "let_in"),
    [
        (("octavo-router",), {"router"}),
        (("octavo-worker",), {"worker"}),
        (("octavo-operator",), {"operator"}),
        (("octavo-router", "octavo-worker"), {"router", "worker"}),
        (("stack.example",), {"router", "worker", "operator"}),
    ],
)
def test_a_certificate_is_good_for_the_roles_it_names(
    authority: Authority, names: tuple[str, ...], let_in: set[str]
) -> None:
    async def test() -> None:
        async with listening(secured(authority)) as (engine, address):
            engine.register_router(ENDPOINT, "", "first")  # so that a worker is told something at once
            found = await statuses(address, shown(authority, authority.issue("peer", *names)))
            assert {role for role, code in found.items() if code is None} == let_in
            assert {code for code in found.values() if code is not None} <= {PERMISSION_DENIED}

    run(test)


def test_a_role_in_the_common_name_counts(authority: Authority) -> None:
    async def test() -> None:
        async with listening(secured(authority)) as (_, address):
            files = authority.issue("peer", "host.example", common_name="octavo-router")
            assert (await statuses(address, shown(authority, files)))["operator"] is PERMISSION_DENIED

    run(test)


def test_nobody_comes_in_without_a_certificate_of_the_stacks_ca(authority: Authority, tmp_path: Path) -> None:
    async def test() -> None:
        forged = Authority(tmp_path / "forger").issue("peer", "octavo-router")
        async with listening(secured(authority)) as (_, address):
            for credentials in (None, shown(authority, None), shown(authority, forged)):
                channel: Any = (
                    grpc.aio.insecure_channel(address)
                    if credentials is None
                    else grpc.aio.secure_channel(address, credentials)
                )
                async with channel:
                    health = health_pb2_grpc.HealthStub(channel)
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await health.Check(health_pb2.HealthCheckRequest())
                    assert refused.value.code() is UNAVAILABLE

    run(test)


@pytest.mark.parametrize("way", ["tls", "unix"])
def test_routers_and_workers_reach_the_scheduler(authority: Authority, tmp_path: Path, way: str) -> None:
    async def test() -> None:
        config = secured(authority) if way == "tls" else SchedulerConfig(host=f"unix:{tmp_path}/s.sock")
        mine = None if way == "unix" else shown(authority, authority.issue("both", "octavo-router", "octavo-worker"))
        endpoint = f"ipc://{tmp_path}/tokens" if way == "unix" else ENDPOINT
        async with listening(config) as (_, address):
            inbox: Inbox = SimpleQueue()
            link = SchedulerLink(address, inbox, mine)
            link.ready(hello(curve_public_key="a-workers-key"))
            link.start()
            router = SchedulerClient(address, endpoint, "r", "a-routers-key", mine)
            ready = asyncio.Event()
            router.on_change(lambda state: ready.set() if state.can_serve("m") else None)
            watching = asyncio.create_task(router.run())
            await ready.wait()
            assert router.state.worker_curve_keys == {"a-workers-key"}
            assert router.state.router_id >= 100
            watching.cancel()
            await router.close()
            await asyncio.to_thread(link.close)

    run(test)


def test_a_changed_certificate_is_shown_to_new_connections(authority: Authority) -> None:
    async def test() -> None:
        files = authority.issue("changing")
        config = SchedulerConfig(
            port=0, internal_tls_cert=files.cert, internal_tls_key=files.key, internal_tls_ca=authority.ca
        )
        tls = server_tls(config)
        assert tls is not None
        assert not tls.refresh()
        authority.issue("changing")
        assert tls.refresh()
        assert not tls.refresh()

    run(test)


def test_options_and_files_that_cannot_be_used_are_named(authority: Authority, tmp_path: Path) -> None:
    for config_class in (SchedulerConfig, WorkerConfig):
        with pytest.raises(OptionError, match="--internal-tls-cert unset"):
            config_class(internal_tls_ca=authority.ca)
    missing = SchedulerConfig(
        internal_tls_cert=str(tmp_path / "none.pem"), internal_tls_key="k", internal_tls_ca=authority.ca
    )
    with pytest.raises(StartError, match=r"--internal-tls-cert .*none.pem: cannot be read"):
        server_tls(missing)

    async def test() -> None:
        with pytest.raises(StartError, match=r"unix:/none/such/s.sock .*choose another --host"):
            listen(grpc.aio.server(), SchedulerConfig(host="unix:/none/such/s.sock"), None)

    run(test)


def test_a_start_says_what_is_open(authority: Authority) -> None:
    for local in ("127.0.0.1", "::1", "localhost", "unix:/run/s.sock"):
        assert exposures(SchedulerConfig(host=local)) == []
    (said,) = exposures(SchedulerConfig(host="0.0.0.0"))
    assert "attach as a worker" in said
    assert "--internal-tls-cert" in said
    files = authority.issue("open")
    safe = SchedulerConfig(
        host="0.0.0.0", internal_tls_cert=files.cert, internal_tls_key=files.key, internal_tls_ca=authority.ca
    )
    assert exposures(safe) == []
