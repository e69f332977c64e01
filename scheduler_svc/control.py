"""ControlService on gRPC: what operators and tests may see and do. Knows the engine's public questions alone."""

from __future__ import annotations

import grpc

from octavo.internal.v1 import scheduler_pb2 as pb
from octavo.internal.v1 import scheduler_pb2_grpc as pb_grpc
from scheduler_svc import wire
from scheduler_svc.engine import Engine


class ControlService(pb_grpc.ControlServiceServicer):
    """ListReplicas and ResetPrefixCache."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def ListReplicas(
        self,
        request: pb.ListReplicasRequest,
        context: grpc.aio.ServicerContext[pb.ListReplicasRequest, pb.ListReplicasResponse],
    ) -> pb.ListReplicasResponse:
        statistics = self._engine.statistics()
        waiting = statistics.num_waiting
        replicas = [wire.replica_to_wire(replica, waiting.get(replica.model, 0)) for replica in statistics.replicas]
        return pb.ListReplicasResponse(replicas=replicas)

    async def ResetPrefixCache(
        self,
        request: pb.ResetPrefixCacheRequest,
        context: grpc.aio.ServicerContext[pb.ResetPrefixCacheRequest, pb.ResetPrefixCacheResponse],
    ) -> pb.ResetPrefixCacheResponse:
        return pb.ResetPrefixCacheResponse(num_blocks=self._engine.reset_prefix_cache())
