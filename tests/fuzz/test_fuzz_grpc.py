"""Messages of any shape over gRPC, shrunk where one is a defect: an answer or a refusal of the closed set."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc as pb_grpc
from tests.fakes.router_stack import Stack, stack
from tests.router.chat_models import write_thinking_model

REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
CALLS: dict[str, type[Message]] = {
    "GenerateUnary": pb.GenerateUnaryRequest,
    "ChatUnary": pb.ChatUnaryRequest,
    "Tokenize": pb.TokenizeRequest,
    "Detokenize": pb.DetokenizeRequest,
}
NUM_QUICK, NUM_LONG = 25, 1500
_MOST_DEPTH = 4
_BITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def scalars(field: Any) -> st.SearchStrategy[Any]:
    """Values of a field: small ones, and all there are."""
    kind = field.cpp_type
    if kind in _BITS:
        return st.integers(0, 4) | st.integers(*_BITS[kind])
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return st.integers(0, 6)
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return st.floats(0, 1) | st.floats(width=32)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=20)
    texts = st.sampled_from(["", "user", "{}", "[1]", '{"type": "object"}', "<|turn|>"])
    return texts | st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


@st.composite
def messages(draw: st.DrawFn, kind: type[Message], depth: int = 0) -> Message:
    """A message with any of its fields set."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        rare = depth >= _MOST_DEPTH or draw(st.integers(0, 2)) > 0
        if rare and not (depth == 0 and field.name == "request"):
            continue
        _fill(draw, message, field, depth)
    return message


def _fill(draw: st.DrawFn, message: Message, field: Any, depth: int) -> None:
    nested = field.message_type
    if nested is not None and nested.GetOptions().map_entry:
        key, value = nested.fields_by_name["key"], nested.fields_by_name["value"]
        for _ in range(draw(st.integers(0, 2))):
            getattr(message, field.name)[draw(scalars(key))] = draw(scalars(value))
    elif nested is not None and field.is_repeated:
        kind = nested._concrete_class
        getattr(message, field.name).extend(draw(st.lists(messages(kind, depth + 1), max_size=2)))
    elif nested is not None:
        getattr(message, field.name).CopyFrom(draw(messages(nested._concrete_class, depth + 1)))
    elif field.is_repeated:
        getattr(message, field.name).extend(draw(st.lists(scalars(field), max_size=3)))
    else:
        setattr(message, field.name, draw(scalars(field)))


@pytest.mark.parametrize("method", CALLS)
def test_a_few_messages(tmp_path: Path, method: str) -> None:
    asyncio.run(_fuzz(tmp_path, method, NUM_QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("method", CALLS)
def test_many_messages(tmp_path: Path, method: str) -> None:
    asyncio.run(_fuzz(tmp_path, method, int(os.environ.get("OCTAVO_FUZZ_EXAMPLES", NUM_LONG))))


async def _fuzz(directory: Path, method: str, num_examples: int) -> None:
    async with stack(write_thinking_model(directory)) as made:
        made.say("ok</think>ok")
        await asyncio.to_thread(_check, made, method, num_examples)
        stub: Any = pb_grpc.InferenceServiceStub(made.channel)
        answer = await stub.GenerateUnary(pb.GenerateUnaryRequest(request=pb.GenerateRequest(text="a")))
        assert answer.choices


def _check(made: Stack, method: str, num_examples: int) -> None:
    with grpc.insecure_channel(made.grpc_address) as channel:
        call = getattr(pb_grpc.InferenceServiceStub(channel), method)

        @settings(
            max_examples=num_examples,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(request=messages(CALLS[method]))
        def check(request: Message) -> None:
            done = call.future(request, timeout=20)
            error = done.exception()
            if error is not None:
                assert done.code() in REFUSALS, (done.code(), done.details(), request)
                assert done.details(), request

        check()
