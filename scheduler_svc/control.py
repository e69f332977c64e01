"""ControlService on gRPC: what operators and tests may see and do. Knows statuses; names are the operators' part."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, ParamSpec, TypeVar

import grpc

from octavo.internal.v1 import scheduler_pb2 as pb
from octavo.internal.v1 import scheduler_pb2_grpc as pb_grpc
from scheduler_svc.aliases import BadAlias
from scheduler_svc.engine import Engine
from scheduler_svc.operators import Operators, Unknown

P = ParamSpec("P")
T = TypeVar("T")

_Context = grpc.aio.ServicerContext[Any, Any]

# Records are joined to pieces of about this size.
_PIECE_BYTES = 1 << 20


class ControlService(pb_grpc.ControlServiceServicer):
    """One coroutine a call."""

    def __init__(self, engine: Engine) -> None:
        self._operators = Operators(engine)

    async def ListReplicas(self, request: pb.ListReplicasRequest, context: _Context) -> pb.ListReplicasResponse:
        return pb.ListReplicasResponse(replicas=self._operators.load().replicas)

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: _Context
    ) -> pb.ResetPrefixCacheResponse:
        return pb.ResetPrefixCacheResponse(num_blocks=self._operators.reset_prefix_cache())

    async def GetStatistics(self, request: pb.GetStatisticsRequest, context: _Context) -> pb.GetStatisticsResponse:
        return self._operators.load()

    async def Explain(self, request: pb.ExplainRequest, context: _Context) -> pb.ExplainResponse:
        await _check_name(request.name, context)
        return pb.ExplainResponse(sequences=await _asked(context, self._operators.explain, request.name))

    async def Update(self, request: pb.UpdateRequest, context: _Context) -> pb.UpdateResponse:
        await _check_name(request.name, context)
        priority = request.priority if request.HasField("priority") else None
        deadline_ns = request.deadline_ns if request.HasField("deadline_ns") else None
        if priority is None and deadline_ns is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "neither priority nor deadline_ns is set; set one")
        return pb.UpdateResponse(
            sequence_ids=await _asked(context, self._operators.update, request.name, priority, deadline_ns)
        )

    async def Cancel(self, request: pb.CancelRequest, context: _Context) -> pb.CancelResponse:
        await _check_name(request.name, context)
        return pb.CancelResponse(sequence_ids=await _asked(context, self._operators.cancel, request.name))

    async def Drain(self, request: pb.DrainRequest, context: _Context) -> pb.DrainResponse:
        return pb.DrainResponse(num_running=await _asked(context, self._operators.drain, request.replica))

    async def Undrain(self, request: pb.UndrainRequest, context: _Context) -> pb.UndrainResponse:
        return pb.UndrainResponse(num_running=await _asked(context, self._operators.undrain, request.replica))

    async def ListAliases(self, request: pb.ListAliasesRequest, context: _Context) -> pb.ListAliasesResponse:
        return pb.ListAliasesResponse(aliases=self._operators.aliases())

    async def SetAlias(self, request: pb.SetAliasRequest, context: _Context) -> pb.SetAliasResponse:
        return pb.SetAliasResponse(num_routers=await _asked(context, self._operators.set_alias, request.alias))

    async def RemoveAlias(self, request: pb.RemoveAliasRequest, context: _Context) -> pb.RemoveAliasResponse:
        return pb.RemoveAliasResponse(num_routers=await _asked(context, self._operators.remove_alias, request.name))

    async def DumpRecorder(
        self, request: pb.DumpRecorderRequest, context: _Context
    ) -> AsyncIterator[pb.DumpRecorderResponse]:
        pieces = self._operators.dump()
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


async def _asked(context: _Context, act: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """What the operators' part answers; what it cannot do ends the call."""
    try:
        return act(*args, **named)
    except Unknown as unknown:
        await context.abort(grpc.StatusCode.NOT_FOUND, str(unknown))
    except BadAlias as bad:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(bad))


async def _check_name(name: pb.SequenceName, context: _Context) -> None:
    if name.WhichOneof("name") is None:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "name is not set; give request_id or sequence_id")
