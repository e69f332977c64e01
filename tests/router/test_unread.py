"""Clients that stop reading: their requests end, however well their connections are."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc as pb_grpc
from router.errors import Cancelled
from router.metrics_catalogue import ABORTS, REFUSALS
from router.sending import ends_unread
from tests.fakes.router_stack import MODEL, Stack, in_loop, stack
from tests.fakes.scheduler import Attempt

LIMIT_S = 0.5
NO_MORE_THAN_THE_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2**14))


async def say_much_and_hang(attempt: Attempt) -> None:
    """More than the windows of HTTP/2 and of a small socket hold, and no end."""
    await attempt.scheduled()
    for position in range(199):
        await attempt.tokens(position, [2 + ord("x")])
    await asyncio.get_running_loop().create_future()


async def read_all(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def until_ended(made: Stack) -> None:
    await made.scheduler.until(lambda: len(made.scheduler.cancelled) == 1)
    await made.router.front.wait_idle()


@in_loop
async def test_a_grpc_client_that_grants_no_window(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "router")
    async with (
        stack(model_dir, say_much_and_hang, send_timeout=LIMIT_S) as made,
        grpc.aio.insecure_channel(made.grpc_address, options=NO_MORE_THAN_THE_WINDOW) as channel,
    ):
        request = pb.GenerateRequest(text="a", options=pb.RequestOptions(request_id="mine"))
        request.sampling.max_tokens = 200
        request.output.logprobs = 20
        call: Any = pb_grpc.InferenceServiceStub(channel).Generate(request)
        await until_ended(made)
        with pytest.raises(grpc.aio.AioRpcError, match="--send-timeout") as ended:
            await read_all(call)
        assert ended.value.code() is grpc.StatusCode.CANCELLED
        assert made.router.metrics.set.number(ABORTS, MODEL, "client_gone").value == 1
        assert made.router.metrics.set.number(REFUSALS, "cancelled", "499").value == 1
    (line,) = [record.getMessage() for record in caplog.records if "request mine" in record.getMessage()]
    assert "client_gone" in line


@pytest.mark.parametrize(
    ("path", "content_type", "body"),
    [
        ("/v1/completions", "application/json", b'{"prompt": "a", "stream": true, "max_tokens": 200, "logprobs": 20}'),
        (
            "/octavo.v1.InferenceService/Generate",
            "application/grpc-web+proto",
            pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=200), output={"logprobs": 20}),
        ),
    ],
)
@in_loop
async def test_an_http_client_that_reads_nothing(
    model_dir: Path, path: str, content_type: str, body: bytes | pb.GenerateRequest
) -> None:
    async with stack(model_dir, say_much_and_hang, send_timeout=LIMIT_S) as made:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", made.router.http_port))
            if isinstance(body, pb.GenerateRequest):
                message = body.SerializeToString()
                body = b"\0" + len(message).to_bytes(4, "big") + message
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {content_type}\r\n"
            client.send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await until_ended(made)
        assert made.router.metrics.set.number(ABORTS, MODEL, "client_gone").value == 1


@in_loop
async def test_only_a_send_that_lasts_is_ended() -> None:
    """Silence of the sequence, and many sends of which each is short, are no stall."""
    loop = asyncio.get_running_loop()
    async with ends_unread(0.05) as sending:
        await asyncio.sleep(0.1)
        end = loop.time() + 0.2
        while loop.time() < end:
            sending.since = loop.time()
            await asyncio.sleep(0)
            sending.since = None
    with pytest.raises(Cancelled, match=r"0.05 s \(--send-timeout\)"):
        await stall(0.05)
    with pytest.raises(TimeoutError, match="of something else"):
        await time_out(0.05)


async def stall(limit_s: float) -> None:
    async with ends_unread(limit_s) as sending:
        sending.since = asyncio.get_running_loop().time()
        await asyncio.get_running_loop().create_future()


async def time_out(limit_s: float) -> None:
    async with ends_unread(limit_s):
        raise TimeoutError("of something else")
