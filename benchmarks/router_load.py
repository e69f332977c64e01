"""What a router is measured with: a scheduler and workers made up, router processes, and clients that read.

Knows how to load a router and what its process has spent; knows no case and no figure.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from benchmarks.bare_grpc import METHOD as BARE_METHOD
from octavo.internal.v1 import worker_pb2
from octavo.ports import free_ports
from octavo.v1 import inference_pb2, inference_pb2_grpc
from tests.fakes.router_stack import MODEL, model_info, write_text_model
from tests.fakes.scheduler import Attempt, FakeScheduler

LOOPBACK = "127.0.0.1"
CONTEXT = 4_000_000
WORDS = [f" w{number:04}" for number in range(2000)]
MAX_TOKENS = 1_000_000
SAMPLING = inference_pb2.SamplingParams(max_tokens=MAX_TOKENS)


class Feeder:
    """Holds the Generate calls that are open and pushes their tokens, a batch a router and step."""

    def __init__(self, first_id: int) -> None:
        self._first_id = first_id
        self._attempts: dict[int, list[Attempt]] = {}
        self.pushed_at: list[float] = []
        """When the token of each position went out, of the loop's clock."""

    async def behave(self, attempt: Attempt) -> None:
        """What every call does: run until it is cancelled."""
        await attempt.scheduled()
        mine = self._attempts.setdefault(attempt.request.router_id, [])
        mine.append(attempt)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            mine.remove(attempt)

    @property
    def num_open(self) -> int:
        return sum(map(len, self._attempts.values()))

    async def step(self, num_tokens: int) -> None:
        """New tokens for every open call."""
        position = len(self.pushed_at)
        self.pushed_at += [asyncio.get_running_loop().time()] * num_tokens
        for attempts in filter(None, self._attempts.values()):
            count = len(attempts)
            ids = [self._first_id + (position + i) % len(WORDS) for i in range(num_tokens)]
            batch = worker_pb2.TokenBatch(
                stream_keys=[attempt.request.stream_key for attempt in attempts],
                attempts=[1] * count,
                positions=[position] * count,
                num_tokens=[num_tokens] * count,
                token_ids=ids * count,
                finish_reasons=[0] * count,  # type: ignore[list-item]
                final_token_ids=[0] * count,
            )
            await attempts[0].push(batch)


@dataclass
class Measured:
    """A process and its ports; `http_port` is 0 where it has none."""

    process: asyncio.subprocess.Process
    grpc_port: int
    http_port: int = 0

    @property
    def cpu_s(self) -> float:
        """User and system time so far, of all its threads."""
        return time.clock_gettime(~self.process.pid << 3 | 2)  # the process's clock, as clock_getcpuclockid names it


@contextlib.asynccontextmanager
async def made_up_scheduler() -> AsyncIterator[tuple[Path, int, Feeder]]:
    """A model directory, and the port of a scheduler that serves it by a feeder."""
    with tempfile.TemporaryDirectory() as directory:
        model = write_text_model(Path(directory) / "model", WORDS)
        info = model_info(model)
        info.max_model_len = CONTEXT
        feeder = Feeder(info.vocab_size - len(WORDS))
        scheduler = FakeScheduler(info, feeder.behave)
        try:
            yield model, await scheduler.start(), feeder
        finally:
            await scheduler.stop()


@contextlib.asynccontextmanager
async def router(model: Path, scheduler_port: int, profile: str | None = None) -> AsyncIterator[Measured]:
    """A router process that is ready."""
    http_port, grpc_port = free_ports(2, LOOPBACK)
    profiled = ["-m", "cProfile", "-o", profile] if profile else []
    command = [sys.executable, *profiled, "-m", "octavo", "router", str(model), "--served-model-name", MODEL]
    command += ["--http-port", str(http_port), "--grpc-port", str(grpc_port), "--log-level", "error"]
    command += ["--scheduler-address", f"{LOOPBACK}:{scheduler_port}"]
    process = await asyncio.create_subprocess_exec(*command)
    async with _ended(process):
        await until(lambda: _is_ready(http_port))
        yield Measured(process, grpc_port, http_port)


@contextlib.asynccontextmanager
async def bare_server(num_streams: int, step_ms: float) -> AsyncIterator[Measured]:
    """A process of `bare_grpc`."""
    command = [sys.executable, "-m", "benchmarks.bare_grpc", str(num_streams), str(step_ms)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    async with _ended(process):
        assert process.stdout is not None
        yield Measured(process, int(await process.stdout.readline()))


@contextlib.asynccontextmanager
async def _ended(process: asyncio.subprocess.Process) -> AsyncIterator[None]:
    try:
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def until(condition: Callable[[], Awaitable[bool]], limit_s: float = 60.0) -> None:
    """Wait for something that becomes true."""
    async with asyncio.timeout(limit_s):
        while not await condition():
            await asyncio.sleep(0.05)


async def _is_ready(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection(LOOPBACK, port)
    except OSError:
        return False
    writer.write(b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    status = await reader.readline()
    writer.close()
    return b" 200 " in status


@dataclass
class Clients:
    """What clients have read: how many tokens in how many deltas, and how long each token was under way, where a
    feeder says since when."""

    num_tokens: int = 0
    num_deltas: int = 0
    feeder: Feeder | None = None
    delays_s: list[float] = field(default_factory=list)

    def read(self, position: int, count: int, num_deltas: int = 1) -> None:
        """Tokens of one stream, from `position` on."""
        self.num_tokens += count
        self.num_deltas += num_deltas
        if self.feeder is not None:
            now = asyncio.get_running_loop().time()
            self.delays_s += [now - at for at in self.feeder.pushed_at[position : position + count]]


async def read_grpc(running: Measured, num_streams: int, clients: Clients) -> None:
    """Open so many streams on one channel and read them until cancelled."""
    async with grpc.aio.insecure_channel(f"{LOOPBACK}:{running.grpc_port}") as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GenerateRequest(text="a question", sampling=SAMPLING)

        async def read() -> None:
            async for response in stub.Generate(request):
                clients.read(response.delta.start_index, len(response.delta.token_ids))

        await asyncio.gather(*(read() for _ in range(num_streams)))


async def read_bare(running: Measured, num_streams: int, clients: Clients) -> None:
    """The same of a `bare_grpc` server; a message is a token."""
    async with grpc.aio.insecure_channel(f"{LOOPBACK}:{running.grpc_port}") as channel:
        method: Any = channel.unary_stream(BARE_METHOD, None, None)

        async def read() -> None:
            async for _ in method(b""):
                clients.read(0, 1)

        await asyncio.gather(*(read() for _ in range(num_streams)))


async def read_sse(running: Measured, num_streams: int, clients: Clients) -> None:
    """Open so many streams, each on a connection of its own, and read them until cancelled."""
    body = json.dumps({"prompt": "a question", "max_tokens": MAX_TOKENS, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"

    async def read() -> None:
        reader, writer = await asyncio.open_connection(LOOPBACK, running.http_port)
        writer.write(head.encode() + body)
        position = 0
        try:
            while data := await reader.read(2**16):
                count = data.count(b" w")
                clients.read(position, count, data.count(b"data: "))
                position += count
        finally:
            writer.close()

    await asyncio.gather(*(read() for _ in range(num_streams)))


READERS: Mapping[str, Callable[[Measured, int, Clients], Awaitable[None]]] = {
    "grpc": read_grpc,
    "sse": read_sse,
    "bare grpc.aio": read_bare,
}


@contextlib.asynccontextmanager
async def reading(surface: str, servers: list[Measured], num_streams: int, clients: Clients) -> AsyncIterator[None]:
    """So many streams of each server are read in this block."""
    tasks = [asyncio.ensure_future(READERS[surface](server, num_streams, clients)) for server in servers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
