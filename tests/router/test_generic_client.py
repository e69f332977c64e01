"""A client that has no stubs of ours: it learns service and messages by reflection, as grpcurl does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.fakes.router_stack import MODEL, in_loop, stack

SERVICE = "octavo.v1.InferenceService"


@in_loop
async def test_every_method_can_be_found_and_one_called(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("héllo")
        names, texts, model = await asyncio.to_thread(_ask, made.grpc_address)
    assert {"Generate", "Chat", "GenerateUnary", "ChatUnary", "Tokenize", "Detokenize", "ListModels"} <= names
    assert ("".join(texts), model) == ("héllo", MODEL)


def _ask(address: str) -> tuple[set[str], list[str], str]:
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert SERVICE in database.get_services()
        service: Any = DescriptorPool(database).FindServiceByName(SERVICE)
        method = service.methods_by_name["Generate"]
        request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        call = channel.unary_stream(
            f"/{SERVICE}/Generate",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        answers: list[Any] = list(call(request(text="a"), timeout=20))
        return set(service.methods_by_name), [one.delta.text for one in answers], answers[-1].model
