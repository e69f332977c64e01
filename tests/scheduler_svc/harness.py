"""A scheduler on real gRPC in this loop, with a router and workers that do what the test says.

The clock stands still unless the test moves it. Nothing here waits for time: what is awaited is a message or a state
that the scheduler reports.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.rpc import status_pb2

from octavo.internal.v1 import scheduler_pb2 as pb
from octavo.internal.v1 import scheduler_pb2_grpc as pb_grpc
from octavo.internal.v1 import types_pb2, worker_pb2
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import CoreLimits
from scheduler_svc.engine import Engine
from scheduler_svc.observers import Observer
from scheduler_svc.server import add_services
from scheduler_svc.service import Networks

MODEL = "m"
ENDPOINT = "tcp://127.0.0.1:7"
END_OF_CALL: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing from the stubs
_BOUND_S = 60.0


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs an asynchronous test; one that hangs fails."""
    asyncio.run(asyncio.wait_for(test(), _BOUND_S))


class Clock:
    """Nanoseconds, moved by hand."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def __call__(self) -> int:
        return self.now_ns

    def pass_s(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


@dataclass
class Shell:
    """The scheduler under test and a channel to it."""

    engine: Engine
    clock: Clock
    channel: grpc.aio.Channel
    port: int

    @property
    def stub(self) -> Any:
        return pb_grpc.SchedulerServiceStub(self.channel)

    @property
    def control(self) -> Any:
        return pb_grpc.ControlServiceStub(self.channel)

    async def replicas(self) -> list[pb.Replica]:
        """What an operator sees."""
        return list((await self.control.ListReplicas(pb.ListReplicasRequest())).replicas)

    async def until(self, holds: Callable[[list[pb.Replica]], bool]) -> list[pb.Replica]:
        """Asks for the replicas until they are as wanted."""
        while not holds(found := await self.replicas()):
            pass
        return found


@contextlib.asynccontextmanager
async def scheduler(
    limits: CoreLimits | None = None, networks: Networks = (), observers: Sequence[Observer] = ()
) -> AsyncIterator[Shell]:
    """A scheduler that checks its laws after each transition."""
    clock = Clock()
    core = Scheduler(limits or CoreLimits())
    engine = Engine(core, clock, first_router_id=100, check_laws=True, observers=observers)
    server = grpc.aio.server()
    add_services(server, engine, networks)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Shell(engine, clock, channel, port)
    finally:
        await server.stop(grace=0)


class Router:
    """A registered router: its Watch, and calls that name it."""

    def __init__(self, shell: Shell, watch: Any, first: pb.WatchResponse) -> None:
        self.shell, self.watch, self.first, self.router_id = shell, watch, first, first.router_id

    async def served(self) -> pb.WatchResponse:
        """The next word of what is served."""
        response: pb.WatchResponse = await self.watch.read()
        return response

    async def until_ready(self, count: int) -> pb.ServedModel:
        """Reads until so many replicas are ready."""
        while True:
            for model in (await self.served()).models:
                if model.num_ready_replicas == count:
                    return model

    def request(self, prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 3, **fields: Any) -> pb.GenerateRequest:
        """A well-formed attempt, with some fields changed."""
        values: dict[str, Any] = {
            "request_id": "r-1",
            "model": MODEL,
            "task": types_pb2.TASK_GENERATE,
            "prompt_token_ids": prompt,
            "sampling": types_pb2.SamplingParams(top_p=1, repetition_penalty=1, max_tokens=max_tokens),
            "router_id": self.router_id,
            "stream_key": 1,
            "attempt": 1,
        }
        return pb.GenerateRequest(**{**values, **fields})

    def generate(self, prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 3, **fields: Any) -> Any:
        """Opens an attempt."""
        return self.shell.stub.Generate(self.request(prompt, max_tokens, **fields))


async def watching(shell: Shell, endpoint: str = ENDPOINT) -> Router:
    """Registers a router."""
    watch = shell.stub.Watch(pb.WatchRequest(token_endpoint=endpoint, name="router"))
    return Router(shell, watch, await watch.read())


class Worker:
    """An attached worker that answers plans as the test says."""

    def __init__(self, call: Any, incarnation: int) -> None:
        self.call, self.incarnation = call, incarnation
        self.endpoints: dict[int, str] = {}

    async def plan(self) -> worker_pb2.StepPlan:
        """The next plan; what is said about routers before it is kept."""
        while True:
            response = await self.call.read()
            assert response is not END_OF_CALL, await status_of(self.call)
            match response.WhichOneof("message"):
                case "plan":
                    plan: worker_pb2.StepPlan = response.plan
                    return plan
                case "router_endpoint":
                    self.endpoints[response.router_endpoint.router_id] = response.router_endpoint.endpoint
                case "router_gone":
                    del self.endpoints[response.router_gone]

    async def answer(self, plan: worker_pb2.StepPlan, *rows: tuple[int, int], **fields: Any) -> None:
        """Says per row which token it sampled and why it ended; (0, 0): nothing, and it goes on."""
        values: dict[str, Any] = {
            "incarnation": self.incarnation,
            "step": plan.step,
            "num_sampled": [1 if token_id else 0 for token_id, _ in rows],
            "token_ids": [token_id for token_id, _ in rows if token_id],
            "finish_reasons": [reason for _, reason in rows],
        }
        result = worker_pb2.StepResult(**{**values, **fields})
        await self.call.write(pb.AttachRequest(result=result))


def hello(name: str = "worker-1", incarnation: int = 11, **fields: Any) -> worker_pb2.Hello:
    """A well-formed Hello, with some fields changed."""
    model = types_pb2.ModelInfo(
        name=MODEL, fingerprint="weights", vocab_size=100, max_model_len=64, numerics="n-1", batch_invariant=True
    )
    values: dict[str, Any] = {
        "name": name,
        "incarnation": incarnation,
        "model": model,
        "block_size": 4,
        "num_device_blocks": 16,
        "num_slots": 4,
        "max_step_tokens": 32,
    }
    return worker_pb2.Hello(**{**values, **fields})


async def attaching(shell: Shell, said: worker_pb2.Hello | None = None) -> Worker:
    """Attaches a worker and waits until the scheduler lists it."""
    said = said or hello()
    call = shell.stub.Attach()
    await call.write(pb.AttachRequest(hello=said))
    await shell.until(lambda found: any(replica.name == said.name for replica in found))
    return Worker(call, said.incarnation)


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """How a call ends."""
    return await call.code(), await call.details()


async def end_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """Reads a call to its end."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not END_OF_CALL:
            pass
    return await status_of(call)


async def details_of(call: Any, kind: type[Message]) -> Message:
    """The one detail of a call's status."""
    metadata = dict(await call.trailing_metadata())
    status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    code, message = await status_of(call)
    assert (status.code, status.message) == (code.value[0], message)
    (packed,) = status.details
    detail = kind()
    assert packed.Unpack(detail), packed.type_url
    return detail
