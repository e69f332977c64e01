"""What a streamed token costs a router, in CPU time of its process. `--json FILE` writes the figures.

Real router processes serve a made-up model over a scheduler that this process plays: at every step it pushes one token
batch a router with new tokens of every stream, as a replica does. Clients, here too, read the streams over gRPC or
server-sent events. Measured is user and system time of the routers alone, so what else the machine does disturbs the
figures little. The cost of a token does not depend on how many routers there are as long as they share nothing, which
the case of two routers shows: each then carries as much as one alone, and both together twice that.
`--profile FILE` runs one case with the router in cProfile instead.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from octavo.internal.v1 import worker_pb2
from octavo.ports import free_port
from octavo.v1 import inference_pb2, inference_pb2_grpc
from tests.fakes.router_stack import MODEL, model_info, write_text_model
from tests.fakes.scheduler import Attempt, FakeScheduler

LOOPBACK = "127.0.0.1"
CONTEXT = 100_000
NUM_WARM_STEPS = 40
NUM_ROUNDS = 4
"""The one that cost least counts: neighbours on the same core make a program slower, never faster."""
WORDS = [f" w{number:04}" for number in range(2000)]
TARGET_US = {"grpc": 60.0, "sse": 90.0}


@dataclass(frozen=True)
class Case:
    """`num_streams` on each of `num_routers`, `tokens_per_delta` new tokens of each stream at every step."""

    surface: str
    num_streams: int = 32
    num_routers: int = 1
    tokens_per_delta: int = 1
    step_ms: float = 25.0

    @property
    def name(self) -> str:
        routers = f", {self.num_routers} routers" if self.num_routers > 1 else ""
        return f"{self.surface}, {self.num_streams} streams, {self.tokens_per_delta} tokens a delta{routers}"


class Feeder:
    """Holds the Generate calls that are open and pushes their tokens, a batch a router and step."""

    def __init__(self, first_id: int) -> None:
        self._first_id = first_id
        self._attempts: dict[int, list[Attempt]] = {}
        self._position = 0

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
        for attempts in filter(None, self._attempts.values()):
            count = len(attempts)
            ids = [self._first_id + (self._position + i) % len(WORDS) for i in range(num_tokens)]
            batch = worker_pb2.TokenBatch(
                stream_keys=[attempt.request.stream_key for attempt in attempts],
                attempts=[1] * count,
                positions=[self._position] * count,
                num_tokens=[num_tokens] * count,
                token_ids=ids * count,
                finish_reasons=[0] * count,  # type: ignore[list-item]
                final_token_ids=[0] * count,
            )
            await attempts[0].push(batch)
        self._position += num_tokens


@dataclass
class RouterProcess:
    """A router and its ports."""

    process: asyncio.subprocess.Process
    http_port: int
    grpc_port: int

    @property
    def cpu_s(self) -> float:
        """User and system time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.asynccontextmanager
async def router(model: Path, scheduler_port: int, profile: str | None = None) -> AsyncIterator[RouterProcess]:
    """A router process that is ready."""
    http_port, grpc_port = free_port(LOOPBACK), free_port(LOOPBACK)
    profiled = ["-m", "cProfile", "-o", profile] if profile else []
    command = [sys.executable, *profiled, "-m", "octavo", "router", str(model), "--served-model-name", MODEL]
    command += ["--http-port", str(http_port), "--grpc-port", str(grpc_port), "--log-level", "error"]
    command += ["--scheduler-address", f"{LOOPBACK}:{scheduler_port}"]
    process = await asyncio.create_subprocess_exec(*command)
    try:
        await _until(lambda: _is_ready(http_port))
        yield RouterProcess(process, http_port, grpc_port)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _until(condition: Callable[[], Awaitable[bool]], limit_s: float = 60.0) -> None:
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
class Counter:
    """Tokens that clients have read."""

    num_tokens: int = 0


async def read_grpc(running: RouterProcess, num_streams: int, counter: Counter) -> None:
    """Open so many streams on one channel and read them until cancelled."""
    async with grpc.aio.insecure_channel(f"{LOOPBACK}:{running.grpc_port}") as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GenerateRequest(text="a question", sampling={"max_tokens": CONTEXT - 20})

        async def read() -> None:
            async for response in stub.Generate(request):
                counter.num_tokens += len(response.delta.token_ids)

        await asyncio.gather(*(read() for _ in range(num_streams)))


async def read_sse(running: RouterProcess, num_streams: int, counter: Counter) -> None:
    """Open so many streams, each on a connection of its own, and read them until cancelled."""
    body = json.dumps({"prompt": "a question", "max_tokens": CONTEXT - 20, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"

    async def read() -> None:
        reader, writer = await asyncio.open_connection(LOOPBACK, running.http_port)
        writer.write(head.encode() + body)
        try:
            while data := await reader.read(2**16):
                counter.num_tokens += data.count(b" w")
        finally:
            writer.close()

    await asyncio.gather(*(read() for _ in range(num_streams)))


READERS = {"grpc": read_grpc, "sse": read_sse}


async def measure(case: Case, num_steps: int, profile: str | None = None) -> dict[str, Any]:
    """Figures of one case: microseconds of CPU per token and per delta, of all routers together."""
    async with contextlib.AsyncExitStack() as cleanup:
        directory = cleanup.enter_context(tempfile.TemporaryDirectory())
        model = write_text_model(Path(directory) / "model", WORDS)
        info = model_info(model)
        info.max_model_len = CONTEXT
        feeder = Feeder(info.vocab_size - len(WORDS))
        scheduler = FakeScheduler(info, feeder.behave)
        port = await scheduler.start()
        cleanup.push_async_callback(scheduler.stop)
        starts = [cleanup.enter_async_context(router(model, port, profile)) for _ in range(case.num_routers)]
        routers = [await start for start in starts]
        counter = Counter()
        tasks = [asyncio.create_task(READERS[case.surface](running, case.num_streams, counter)) for running in routers]
        try:
            return await _drive(case, num_steps, feeder, counter, routers)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _drive(
    case: Case, num_steps: int, feeder: Feeder, counter: Counter, routers: list[RouterProcess]
) -> dict[str, Any]:
    num_streams = case.num_streams * case.num_routers

    async def all_open() -> bool:
        return feeder.num_open == num_streams

    async def run(count: int) -> None:
        loop = asyncio.get_running_loop()
        due, aim = loop.time(), counter.num_tokens + count * num_streams * case.tokens_per_delta
        for _ in range(count):
            await feeder.step(case.tokens_per_delta)
            due += case.step_ms / 1000
            await asyncio.sleep(max(0.0, due - loop.time()))

        async def all_read() -> bool:
            return counter.num_tokens >= aim

        await _until(all_read)

    await _until(all_open)
    await run(NUM_WARM_STEPS)
    rounds = []
    for _ in range(NUM_ROUNDS):
        before = [running.cpu_s for running in routers]
        await run(num_steps)
        rounds.append([running.cpu_s - start for running, start in zip(routers, before, strict=True)])
    spent = min(rounds, key=sum)
    num_deltas = num_steps * num_streams
    return {
        "case": case.name,
        "us_per_token": round(sum(spent) / num_deltas / case.tokens_per_delta * 1e6, 1),
        "us_per_delta": round(sum(spent) / num_deltas * 1e6, 1),
        "us_per_token_by_router": [
            round(one * len(spent) / num_deltas / case.tokens_per_delta * 1e6, 1) for one in spent
        ],
        # What one core for each router would carry.
        "tokens_per_s_of_all_cores": round(num_deltas * case.tokens_per_delta / max(spent)) if max(spent) else None,
    }


CASES = [
    Case("grpc"),
    Case("sse"),
    Case("grpc", tokens_per_delta=4),
    Case("sse", tokens_per_delta=4),
    Case("grpc", num_routers=2),
    Case("sse", num_routers=2),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--steps", type=int, default=200, help="steps of each round")
    parser.add_argument("--only", default="", help="run the cases whose name holds this")
    parser.add_argument("--step-ms", type=float, default=25.0, help="time from one step to the next")
    parser.add_argument("--profile", help="file for the router's profile; runs the first case alone")
    arguments = parser.parse_args()
    found = []
    for case in [case for case in CASES if arguments.only in case.name][: 1 if arguments.profile else None]:
        timed = Case(case.surface, case.num_streams, case.num_routers, case.tokens_per_delta, arguments.step_ms)
        figures = asyncio.run(measure(timed, arguments.steps, arguments.profile))
        found.append(figures)
        print(
            f"{figures['case']:<48} {figures['us_per_token']:>7.1f} µs/token  {figures['us_per_delta']:>7.1f} µs/delta"
            f"  {figures['tokens_per_s_of_all_cores']:>8} tokens/s",
            flush=True,
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"cases": found, "target_us_per_token": TARGET_US}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
