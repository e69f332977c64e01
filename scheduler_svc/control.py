"""ControlService on gRPC: what operators and tests may see and do. Knows the engine's public questions alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from octavo.internal.v1 import scheduler_pb2 as pb
from octavo.internal.v1 import scheduler_pb2_grpc as pb_grpc
from scheduler_svc.control_wire import explanation_to_wire
from scheduler_svc.engine import Call, Engine

_Context = grpc.aio.ServicerContext[Any, Any]

# Records are joined to pieces of about this size.
_PIECE_BYTES = 1 << 20


class ControlService(pb_grpc.ControlServiceServicer):
    """Looks in, and does by name what the core offers by id."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def ListReplicas(self, request: pb.ListReplicasRequest, context: _Context) -> pb.ListReplicasResponse:
        return pb.ListReplicasResponse(replicas=self._engine.replicas())

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: _Context
    ) -> pb.ResetPrefixCacheResponse:
        return pb.ResetPrefixCacheResponse(num_blocks=self._engine.reset_prefix_cache())

    async def GetStatistics(self, request: pb.GetStatisticsRequest, context: _Context) -> pb.GetStatisticsResponse:
        return self._engine.load()

    async def Explain(self, request: pb.ExplainRequest, context: _Context) -> pb.ExplainResponse:
        match request.name.WhichOneof("name"):
            case "request_id":
                found = self._engine.explain(request.name.request_id, None)
            case "sequence_id":
                found = self._engine.explain(None, request.name.sequence_id)
            case _:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, _UNNAMED)
        if not found:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"{_shown(request.name)} is neither live nor among the latest that ended"
            )
        names, now = self._engine.replica_names(), self._engine.now()
        return pb.ExplainResponse(sequences=[explanation_to_wire(each, names, now) for each in found])

    async def Update(self, request: pb.UpdateRequest, context: _Context) -> pb.UpdateResponse:
        priority = request.priority if request.HasField("priority") else None
        deadline_ns = request.deadline_ns if request.HasField("deadline_ns") else None
        if priority is None and deadline_ns is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "neither priority nor deadline_ns is set; set one")
        calls = await self._live(request.name, context)
        for call in calls:
            self._engine.update(call, priority, deadline_ns)
        return pb.UpdateResponse(sequence_ids=[call.sequence_id for call in calls])

    async def Cancel(self, request: pb.CancelRequest, context: _Context) -> pb.CancelResponse:
        calls = await self._live(request.name, context)
        for call in calls:
            self._engine.cancel_for_operator(call)
        return pb.CancelResponse(sequence_ids=[call.sequence_id for call in calls])

    async def Drain(self, request: pb.DrainRequest, context: _Context) -> pb.DrainResponse:
        try:
            num_running = self._engine.drain(request.replica)
        except KeyError as unknown:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(unknown.args[0]))
        return pb.DrainResponse(num_running=num_running)

    async def DumpRecorder(
        self, request: pb.DumpRecorderRequest, context: _Context
    ) -> AsyncIterator[pb.DumpRecorderResponse]:
        pieces = self._engine.dump()
        if pieces is None:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                "nothing is recorded; start the scheduler with --flight-recorder-size above 0",
            )
        piece = bytearray()
        for data in pieces:
            piece += data
            if len(piece) >= _PIECE_BYTES:
                yield pb.DumpRecorderResponse(data=bytes(piece))
                piece.clear()
        yield pb.DumpRecorderResponse(data=bytes(piece))

    async def _live(self, name: pb.SequenceName, context: _Context) -> list[Call]:
        match name.WhichOneof("name"):
            case "request_id":
                calls = self._engine.live_calls(name.request_id)
            case "sequence_id":
                calls = self._engine.live_call(name.sequence_id)
            case _:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, _UNNAMED)
        if not calls:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"{_shown(name)} is not live")
        return calls


_UNNAMED = "name is not set; give request_id or sequence_id"


def _shown(name: pb.SequenceName) -> str:
    return f"request {name.request_id!r}" if name.HasField("request_id") else f"sequence {name.sequence_id}"
