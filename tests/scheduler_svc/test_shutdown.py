"""The process's end: every open call is told, and nothing is logged as an error."""

from __future__ import annotations

import logging

import grpc
import grpc.aio
import pytest

from octavo.internal.v1 import scheduler_pb2 as pb
from octavo.internal.v1 import types_pb2
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine import Engine
from scheduler_svc.server import add_services
from tests.scheduler_svc.harness import Clock, Shell, attaching, end_of, run, watching

SHUTTING_DOWN = (grpc.StatusCode.UNAVAILABLE, "the scheduler is shutting down; try again")


def test_open_calls_end_as_unavailable_and_without_errors_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        engine = Engine(Scheduler(), Clock())
        server = grpc.aio.server()
        service = add_services(server, engine, ())
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            shell = Shell(engine, Clock(), channel, port)
            starting = shell.stub.Attach()
            phase = types_pb2.StartPhase(name="kv")
            await starting.write(pb.AttachRequest(starting=pb.WorkerStarting(name="worker-2", phase=phase)))
            router, worker = await watching(shell), await attaching(shell)
            while not router.first.starting:
                router.first = await router.served()
            call = router.generate()
            await worker.plan()
            service.close()
            await server.stop(grace=30)
            for open_call in (router.watch, call, worker.call, starting):
                assert await end_of(open_call) == SHUTTING_DOWN

    with caplog.at_level(logging.WARNING):
        run(test)
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []
