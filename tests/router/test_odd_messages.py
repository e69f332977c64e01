"""Any message of any shape over gRPC: an answer or a refusal of the closed set, never a defect."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from octavo.v1 import inference_pb2 as pb
from tests.fakes.router_stack import in_loop, stack
from tests.router.chat_models import write_thinking_model
from tests.router.test_grpc import stub

NUM_MESSAGES = 150
EXPECTED = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED}
TEXTS = ["", "x", "add", "user", "{}", '{"x": 1}', "[1]", "{bad", "<|turn|>", "\0", "é" * 40]
NUMBERS = [0, 1, 2, 20, 128, 2**31 - 1]
REALS = [0.0, 0.5, 1.0, -1.0, 2.5, float("nan"), float("inf")]


def fill(message: Message, rng: random.Random, depth: int = 0) -> Message:
    """Set some fields, at random, to odd values."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.6 or depth > 3:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)[rng.choice(NUMBERS)] = rng.choice(REALS)
        elif field.message_type is not None and field.is_repeated:
            for _ in range(rng.randrange(3)):
                fill(getattr(message, field.name).add(), rng, depth + 1)
        elif field.message_type is not None:
            found = getattr(message, field.name)
            found.SetInParent()
            fill(found, rng, depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).extend(scalar(field, rng) for _ in range(rng.randrange(3)))
        else:
            setattr(message, field.name, scalar(field, rng))
    return message


def scalar(field: Any, rng: random.Random) -> object:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            text = rng.choice(TEXTS)
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return rng.choice(REALS)
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.randrange(4)
        case FieldDescriptor.CPPTYPE_INT32 | FieldDescriptor.CPPTYPE_INT64:
            return rng.choice([*NUMBERS, -1, -(2**31)])
    return rng.choice(NUMBERS)


@in_loop
async def test_odd_messages(tmp_path: Path) -> None:
    rng = random.Random(6)
    num_answered, refused = 0, []
    async with stack(write_thinking_model(tmp_path)) as made:
        made.say("ok</think>ok")
        calls = (
            (stub(made).GenerateUnary, pb.GenerateUnaryRequest),
            (stub(made).ChatUnary, pb.ChatUnaryRequest),
            (stub(made).Tokenize, pb.TokenizeRequest),
            (stub(made).Detokenize, pb.DetokenizeRequest),
        )
        for number in range(NUM_MESSAGES):
            method, kind = calls[number % len(calls)]
            request = fill(kind(), rng)
            if hasattr(request, "request"):
                request.request.resume = b""
            try:
                await method(request)
                num_answered += 1
            except grpc.aio.AioRpcError as error:
                refused.append((error.code(), error.details() or "", str(request)))
        assert (await stub(made).GenerateUnary(pb.GenerateUnaryRequest(request=pb.GenerateRequest(text="a")))).choices
    assert num_answered > 3
    assert [one for one in refused if one[0] not in EXPECTED or not one[1]] == []
