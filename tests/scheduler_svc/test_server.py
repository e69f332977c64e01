"""The port itself: operators' calls, health, reflection, and whatever strangers send."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from octavo.internal.v1 import scheduler_pb2 as pb
from octavo.internal.v1 import types_pb2
from octavo.process import StartError
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.server import core_limits, token_networks, until_asked
from tests.scheduler_svc.harness import Shell, attaching, hello, run, scheduler, status_of, watching

LENGTH = types_pb2.FINISH_REASON_LENGTH
SERVICES = ("octavo.internal.v1.SchedulerService", "octavo.internal.v1.ControlService")
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\x04\0\0\0\0\0"


def test_operators_see_load_and_forget_cached_prefixes() -> None:
    async def test() -> None:
        async with scheduler() as shell:
            router, worker = await watching(shell), await attaching(shell)
            prompt = list(range(1, 10))
            router.generate(prompt, max_tokens=1)
            router.generate(prompt, max_tokens=1, model="m", stream_key=2, tenant="other")
            await shell.until(lambda found: found[0].num_running == 2)
            (busy,) = await shell.replicas()
            assert (busy.name, busy.model, busy.num_blocks, busy.num_used_blocks) == ("worker-1", "m", 16, 6)
            num_rows = 0
            while num_rows < 2:
                plan = await worker.plan()
                num_rows += len(plan.row_slots)
                await worker.answer(plan, *[(9, LENGTH)] * len(plan.row_slots))
            (idle,) = await shell.until(lambda found: found[0].num_running == 0)
            assert (idle.num_used_blocks, idle.num_cached_blocks, idle.num_preemptions) == (0, 4, 0)
            assert idle.num_steps >= 1
            reset = pb.ResetPrefixCacheRequest()
            assert (await shell.control.ResetPrefixCache(reset)).num_blocks == 4
            assert (await shell.control.ResetPrefixCache(reset)).num_blocks == 0
            assert (await shell.replicas())[0].num_cached_blocks == 0

    run(test)


def test_waiting_work_is_shown_beside_each_replica_of_its_model() -> None:
    async def test() -> None:
        async with scheduler() as shell:
            router = await watching(shell)
            await attaching(shell, hello(num_slots=1))
            for key in (1, 2, 3):
                router.generate(stream_key=key)
            (replica,) = await shell.until(lambda found: found[0].num_waiting == 2)
            assert replica.num_running == 1

    run(test)


@pytest.mark.parametrize("service", ["", *SERVICES])
def test_health_answers_for_the_whole_and_for_each_service(service: str) -> None:
    async def test() -> None:
        async with scheduler() as shell:
            stub: Any = health_pb2_grpc.HealthStub(shell.channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            assert service in (await stub.List(health_pb2.HealthListRequest())).statuses

    run(test)


def test_reflection_lists_the_services() -> None:
    async def test() -> None:
        async with scheduler() as shell:
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(shell.channel)
            call = stub.ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            found = {service.name for service in (await call.read()).list_services_response.service}
            assert found >= {*SERVICES, "grpc.health.v1.Health"}
            call.cancel()

    run(test)


async def send_raw(shell: Shell, data: bytes) -> None:
    """Writes bytes to the port and closes the connection, whatever is answered."""
    _, writer = await asyncio.open_connection("127.0.0.1", shell.port)
    writer.write(data)
    await writer.drain()
    writer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes(range(256)) * 40,
        PREFACE[:10],
        PREFACE + SETTINGS[:5],
        PREFACE + SETTINGS + b"\xff\xff\xff\x01\x04\0\0\0\x01half a frame",
        PREFACE + SETTINGS + b"\0\0\x04\0\0\0\0\0\0data on stream zero",
    ],
    ids=["nothing", "http/1.1", "garbage", "half preface", "half settings", "half headers", "bad stream"],
)
def test_f68_garbage_on_the_port_disturbs_nobody(data: bytes) -> None:
    async def test() -> None:
        async with scheduler() as shell:
            router, worker = await watching(shell), await attaching(shell)
            for _ in range(5):
                await send_raw(shell, data)
            call = router.generate(max_tokens=1)
            await worker.answer(await worker.plan(), (9, LENGTH))
            assert (await call.read()).HasField("scheduled")
            assert (await call.read()).finished.num_output_tokens == 1

    run(test)


@pytest.mark.parametrize("method", ["Watch", "Generate"])
@pytest.mark.parametrize("payload", [b"\xff\xff\xff", b"\x0a\x7f", b"\x7d"])
def test_a_message_that_is_no_protobuf_fails_its_call_alone(method: str, payload: bytes) -> None:
    async def test() -> None:
        async with scheduler() as shell:
            channel: Any = shell.channel
            raw = channel.unary_stream(f"/octavo.internal.v1.SchedulerService/{method}")
            call = raw(payload)
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()
            assert (await status_of(call))[0] in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
            assert (await watching(shell)).router_id

    run(test)


def test_a_part_that_fails_ends_the_process_and_one_that_is_done_does_not() -> None:
    async def done() -> None:
        pass

    async def fail() -> None:
        raise ValueError("a defect")

    async def test() -> None:
        forever: asyncio.Event = asyncio.Event()
        parts = [asyncio.create_task(done()), asyncio.create_task(fail())]
        with pytest.raises(ValueError, match="a defect"):
            await until_asked(_wait(forever), parts)
        asked = asyncio.Event()
        parts = [asyncio.create_task(done()), asyncio.create_task(_wait(forever))]
        waiting = asyncio.create_task(until_asked(_wait(asked), parts))
        await parts[0]
        assert not waiting.done()
        asked.set()
        await waiting
        parts[1].cancel()

    run(test)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


def test_options_become_limits_and_networks() -> None:
    config = SchedulerConfig(max_num_seqs=3, max_waiting_requests=7, token_networks="10.0.0.0/8, fd00::/8")
    limits = core_limits(config)
    assert (limits.max_num_seqs, limits.max_waiting, limits.enable_prefix_caching) == (3, 7, True)
    assert [str(network) for network in token_networks(config)] == ["10.0.0.0/8", "fd00::/8"]
    with pytest.raises(StartError, match=r"--token-networks.*10\.0\.0\.1/8"):
        token_networks(SchedulerConfig(token_networks="10.0.0.1/8"))
