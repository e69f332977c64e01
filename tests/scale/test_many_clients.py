"""A thousand clients whose streams say nothing: the router answers others, rests, and holds little for each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import time
from pathlib import Path
from typing import Any

from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc as pb_grpc
from tests.fakes.router_stack import Stack, stack, write_text_model
from tests.fakes.scheduler import hang, speak

NUM_SSE = NUM_GRPC = 500
TIMEOUT_S = 120.0
MOST_KIB_PER_CLIENT = 250
"""Router, fake scheduler and client together: they share this process."""
IDLE_S, MOST_IDLE_CPU_S = 1.0, 0.25


def test_a_thousand_idle_streams(tmp_path: Path) -> None:
    asyncio.run(asyncio.wait_for(_thousand(write_text_model(tmp_path)), TIMEOUT_S))


async def _thousand(model_dir: Path) -> None:
    async with stack(model_dir, hang) as made, contextlib.AsyncExitStack() as cleanup:
        before_kib = _resident_kib()
        await asyncio.gather(*(_open_sse(made, cleanup) for _ in range(NUM_SSE)))
        stub: Any = pb_grpc.InferenceServiceStub(made.channel)
        calls = [stub.Generate(pb.GenerateRequest(text="a")) for _ in range(NUM_GRPC)]
        await asyncio.gather(*(call.read() for call in calls))
        assert made.router.front.num_live == NUM_SSE + NUM_GRPC
        assert (_resident_kib() - before_kib) / (NUM_SSE + NUM_GRPC) < MOST_KIB_PER_CLIENT
        # Nothing is done for them while nothing happens.
        spent = time.process_time()
        await asyncio.sleep(IDLE_S)
        assert time.process_time() - spent < MOST_IDLE_CPU_S
        # Others are served beside them, at the cost of ever.
        made.scheduler.behave = speak(made.ids("hello"))
        spent = time.process_time()
        answer = await made.http.post("/v1/completions", json={"prompt": "a"})
        assert answer.json()["choices"][0]["text"] == "hello"
        assert (await made.http.get("/health")).status_code == 200
        assert time.process_time() - spent < 0.5
        for call in calls:
            call.cancel()
    assert made.router.front.num_live == 0


async def _open_sse(made: Stack, cleanup: contextlib.AsyncExitStack) -> None:
    """A stream that has had its first token."""
    body = json.dumps({"prompt": "a", "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", made.router.http_port)
    cleanup.callback(writer.close)
    writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    await reader.readuntil(b"data: ")


def _resident_kib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1024
