"""A scheduler and its workers in one object, for routers: speaks Watch and Generate, and pushes tokens over ZeroMQ.

What a Generate call does is a coroutine given by the test, from telling the truth to losing, repeating and breaking
anything; `speak` is the truthful one. Everything that routers sent is kept for the test to look at.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Never

import grpc
import grpc.aio
import zmq
import zmq.asyncio
from google.protobuf.message import Message
from google.rpc import status_pb2

from octavo.internal.v1 import scheduler_pb2 as pb
from octavo.internal.v1 import scheduler_pb2_grpc as pb_grpc
from octavo.internal.v1 import types_pb2, worker_pb2

REPLICA = "replica-1"
END, STOP, LENGTH = (
    types_pb2.FINISH_REASON_END_TOKEN,
    types_pb2.FINISH_REASON_STOP_TOKEN,
    types_pb2.FINISH_REASON_LENGTH,
)

Behaviour = Callable[["Attempt"], Awaitable[None]]


@dataclass
class Attempt:
    """One Generate call, as its behaviour sees it."""

    request: pb.GenerateRequest
    context: Any
    push: Callable[[worker_pb2.TokenBatch], Awaitable[None]]

    async def event(self, **event: Any) -> None:
        """Send one event, named as in GenerateResponse."""
        await self.context.write(pb.GenerateResponse(**event))

    async def scheduled(self, cached_tokens: int = 0, replica: str = REPLICA) -> None:
        await self.event(
            scheduled=pb.Scheduled(
                replica=replica, cached_tokens=cached_tokens, queue_ns=1000, numerics="n1", batch_invariant=True
            )
        )

    async def tokens(
        self,
        position: int,
        ids: Sequence[int],
        finish: int = 0,
        final_token_id: int = 0,
        attempt: int = 0,
        logprob: float = -0.5,
    ) -> None:
        """Push new tokens of this sequence, with logprobs where they were asked for."""
        batch = worker_pb2.TokenBatch(
            stream_keys=[self.request.stream_key],
            attempts=[attempt or self.request.attempt],
            positions=[position],
            num_tokens=[len(ids)],
            token_ids=ids,
            finish_reasons=[finish],  # type: ignore[list-item]
            final_token_ids=[final_token_id],
        )
        if self.request.sampling.HasField("num_logprobs"):
            top, top_ids = alternatives(ids, self.request.sampling.num_logprobs)
            batch.logprobs.add(
                index=0,
                sampled=[logprob] * len(ids),
                num_top=self.request.sampling.num_logprobs,
                top_token_ids=top_ids,
                top=top,
            )
        await self.push(batch)

    async def prompt_logprobs(self) -> None:
        """Push the prompt's logprobs where they were asked for, in two pieces."""
        sampling = self.request.sampling
        if not sampling.HasField("num_prompt_logprobs"):
            return
        first, end = max(1, sampling.prompt_logprobs_start), len(self.request.prompt_token_ids)
        middle = (first + end) // 2
        for start, stop in ((first, middle), (middle, end)):
            ids = self.request.prompt_token_ids[start:stop]
            top, top_ids = alternatives(ids, sampling.num_prompt_logprobs)
            entry = worker_pb2.PromptLogprobs(
                stream_key=self.request.stream_key,
                attempt=self.request.attempt,
                start=start,
                tokens=[-1.0] * len(ids),
                num_top=sampling.num_prompt_logprobs,
                top_token_ids=top_ids,
                top=top,
            )
            await self.push(worker_pb2.TokenBatch(prompt_logprobs=[entry]))

    async def finished(self, num_output_tokens: int, finish: int = END) -> None:
        await self.event(
            finished=pb.Finished(num_output_tokens=num_output_tokens, finish_reason=finish)  # type: ignore[arg-type]
        )

    async def fail(self, code: grpc.StatusCode, message: str, detail: Message | None = None) -> Never:
        """End the call with a status."""
        status = status_pb2.Status(code=code.value[0], message=message)
        if detail is not None:
            status.details.add().Pack(detail)
        await self.context.abort(code, message, (("grpc-status-details-bin", status.SerializeToString()),))
        raise AssertionError("abort returned")


def alternatives(ids: Sequence[int], count: int) -> tuple[list[float], list[int]]:
    """(logprobs, ids) of `count` made-up alternatives for each token: itself, then the ids after it."""
    top = [-0.5 - rank for _ in ids for rank in range(count)]
    return top, [token_id + rank for token_id in ids for rank in range(count)]


def speak(ids: Sequence[int], chunk: int = 1) -> Behaviour:
    """Truthfully say `ids` and an end token, within max_tokens, ending early at end and stop tokens among them."""

    async def behave(attempt: Attempt) -> None:
        sampling = attempt.request.sampling
        said, finish, final = list(ids[: sampling.max_tokens]), LENGTH, 0
        if len(ids) < sampling.max_tokens:
            finish = END
        for position, token_id in enumerate(said):
            ends = token_id in sampling.end_token_ids and position >= sampling.min_tokens
            if ends or token_id in sampling.stop_token_ids:
                said, final = said[:position], token_id
                finish = END if ends else STOP
                break
        await attempt.scheduled()
        await attempt.prompt_logprobs()
        position = len(attempt.request.prior_token_ids)
        while position < len(said):
            part = said[position : position + chunk]
            is_last = position + len(part) == len(said) and finish == LENGTH
            await attempt.tokens(position, part, LENGTH if is_last else 0)
            position += len(part)
        if finish != LENGTH:
            await attempt.tokens(position, (), finish, final)
        await attempt.finished(len(said), finish)

    return behave


async def hang(attempt: Attempt) -> None:
    """Say one token, then nothing until the call is cancelled."""
    await attempt.scheduled()
    await attempt.tokens(0, [2 + ord("x")])
    await asyncio.get_running_loop().create_future()


@dataclass
class FakeScheduler(pb_grpc.SchedulerServiceServicer):
    """Serves `info`, and `others` beside it. `behave` decides what a call does; replace it at any time."""

    info: types_pb2.ModelInfo
    behave: Behaviour
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    cancelled: list[pb.GenerateRequest] = field(default_factory=list)
    num_ready_replicas: int = 1
    starting: list[pb.StartingWorker] = field(default_factory=list)
    others: list[types_pb2.ModelInfo] = field(default_factory=list)
    aliases: pb.AliasTable = field(default_factory=pb.AliasTable)
    watches: list[pb.WatchRequest] = field(default_factory=list)
    _changes: list[asyncio.Event] = field(default_factory=list)
    _happened: asyncio.Condition = field(default_factory=asyncio.Condition)
    _sockets: dict[int, zmq.asyncio.Socket] = field(default_factory=dict)

    async def start(self, port: int = 0) -> int:
        """Listen on loopback; returns the port."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_SchedulerServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        return port

    async def stop(self) -> None:
        """Break every call and stop listening."""
        await self._server.stop(0)
        for socket in self._sockets.values():
            socket.close()
        self._sockets.clear()

    def announce(self) -> None:
        """Tell routers the state again, after a change."""
        for event in self._changes:
            event.set()

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Wait for something that calls make true."""
        async with self._happened:
            await self._happened.wait_for(predicate)

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchResponse]:
        self.watches.append(request)
        await self._notify()
        router_id = len(self._sockets) + 1
        socket = zmq.asyncio.Context.instance().socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(request.token_endpoint)
        self._sockets[router_id] = socket
        changed = asyncio.Event()
        self._changes.append(changed)
        while True:
            changed.clear()
            infos = [info for info in (self.info, *self.others) if info.name]
            models = [pb.ServedModel(info=info, num_ready_replicas=self.num_ready_replicas) for info in infos]
            yield pb.WatchResponse(router_id=router_id, models=models, starting=self.starting, aliases=self.aliases)
            await changed.wait()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        self.requests.append(request)
        try:
            await self._notify()
            await self._answer(request, context)
        except asyncio.CancelledError:
            self.cancelled.append(request)
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().create_task(self._notify())
            raise

    async def _answer(self, request: pb.GenerateRequest, context: Any) -> None:
        socket = self._sockets.get(request.router_id)
        if socket is None:  # as the scheduler does: this router's Watch of the scheduler before is over
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"router_id {request.router_id} is not registered")
            raise AssertionError("abort returned")

        async def push(batch: worker_pb2.TokenBatch) -> None:
            await socket.send(batch.SerializeToString())

        await self.behave(Attempt(request, context, push))

    async def Attach(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        """Nobody attaches here: the workers are part of this object."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "the fake scheduler has its workers inside")

    async def send_raw(self, router_id: int, *frames: bytes) -> None:
        """Push any bytes to a router's token socket."""
        await self._sockets[router_id].send_multipart(frames)

    async def _notify(self) -> None:
        async with self._happened:
            self._happened.notify_all()
