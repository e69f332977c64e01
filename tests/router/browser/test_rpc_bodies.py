"""What arrives at the Connect and gRPC-Web paths and is no call: the client's mistake, and the router is unharmed."""

from __future__ import annotations

import base64
import random
from pathlib import Path

import grpc
import httpx2
import pytest

from octavo.v1 import inference_pb2 as pb
from tests.fakes.router_stack import Stack, in_loop, stack
from tests.fakes.web_rpc import Form, call, frame, path_of, read

CHAT = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hi")])
PROTO = CHAT.SerializeToString()
INVALID = grpc.StatusCode.INVALID_ARGUMENT.value[0]


async def send(made: Stack, content_type: str, body: bytes, method: str = "Chat") -> httpx2.Response:
    return await made.http.post(path_of(method), content=body, headers={"content-type": content_type})


async def still_answers(made: Stack) -> None:
    made.say("ok")
    ended = await call(made.http, Form.CONNECT_JSON, "Chat", CHAT)
    assert "".join(message.delta.text for message in ended.messages) == "ok"


JSON_BODIES = {
    "no JSON": b"{",
    "no UTF-8": b'{"messages": [{"role": "\xff"}]}',
    "an array": b"[]",
    "a wrong type": b'{"messages": 1}',
    "a number for a text": b'{"model": 5}',
    "a lone surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "two of a oneof": b'{"toolChoice": {"mode": 1, "name": "f"}, "messages": []}',
    "a huge integer": b'{"sampling": {"seed": ' + b"9" * 5000 + b"}}",
    "deep nesting": b'{"messages": ' + b"[" * 100_000,
    "nothing": b"",
}


@in_loop
async def test_json_that_is_no_request(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        for kind, body in JSON_BODIES.items():
            whole = await read(Form.CONNECT_JSON, "ChatUnary", await send(made, "application/json", body, "ChatUnary"))
            streamed = await read(Form.CONNECT_JSON, "Chat", await send(made, "application/connect+json", frame(body)))
            # To the unary method a body without `request` is one without messages, so all are wrong for both.
            assert (whole.code, streamed.code) == (INVALID, INVALID), kind
            assert len(streamed.message) < 1000
            assert made.scheduler.requests == []
        await still_answers(made)


FRAMES = {
    "a piece of a frame": (frame(PROTO)[:-1], INVALID),
    "a piece of a head": (frame(PROTO)[:3], INVALID),
    "flags that mean nothing": (frame(PROTO, 0x40), INVALID),
    "no protobuf": (frame(b"\xff\xff\xff"), INVALID),
    "no UTF-8": (frame(PROTO.replace(b"hi", b"\xff\xff")), INVALID),
    "two requests": (frame(PROTO) * 2, grpc.StatusCode.UNIMPLEMENTED.value[0]),
    "no request": (b"", grpc.StatusCode.UNIMPLEMENTED.value[0]),
    "a compressed one": (frame(PROTO, 1), grpc.StatusCode.INTERNAL.value[0]),  # as Connect's specification has it
}


@pytest.mark.parametrize("form", [Form.CONNECT_PROTO, Form.WEB_PROTO, Form.WEB_TEXT])
@in_loop
async def test_frames_that_are_no_request(model_dir: Path, form: Form) -> None:
    async with stack(model_dir) as made:
        for kind, (body, code) in FRAMES.items():
            coded = base64.b64encode(body) if form is Form.WEB_TEXT else body
            ended = await read(form, "Chat", await send(made, form.content_type(streaming=True), coded))
            assert ended.code == code, kind
            assert made.scheduler.requests == []
        await still_answers(made)


@in_loop
async def test_base64_in_pieces_and_base64_that_is_none(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("ok")
        whole, text = frame(PROTO), Form.WEB_TEXT.content_type(streaming=True)
        pieces = b"".join(base64.b64encode(whole[start : start + 4]) for start in range(0, len(whole), 4))
        assert b"==" in pieces[:-4]
        assert (await read(Form.WEB_TEXT, "Chat", await send(made, text, pieces))).code == 0
        for bad in (b"!!!!", pieces[:-1], b"====", b"QQ=Q", "é".encode() * 4):
            assert (await read(Form.WEB_TEXT, "Chat", await send(made, text, bad))).code == INVALID, bad


@in_loop
async def test_content_types_that_are_not_spoken(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        for odd in (
            "text/plain",
            "application/xml",
            "application/connect+xml",
            "multipart/form-data",
            "application/grpc",
        ):
            answer = await send(made, odd, frame(PROTO))
            assert answer.status_code == 415, odd
        assert "--grpc-port" in (await send(made, "application/grpc+proto", frame(PROTO))).text
        assert (await made.http.post(path_of("Chat"), content=b"")).status_code == 415
        assert (await made.http.get(path_of("Chat"))).status_code == 405
        assert (await send(made, "application/json", b"{}", "Nothing")).status_code == 404
        assert made.scheduler.requests == []


@in_loop
async def test_headers_of_any_bytes(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        headers = {b"content-type": b"application/json", b"x-odd": b"\xff\xfe", b"x-request-id": b"\xe9ok"}
        answer = await made.http.post(path_of("ListModels"), content=b"{}", headers=headers)
        assert answer.status_code == 200


@pytest.mark.parametrize("form", Form)
@in_loop
async def test_the_limit_of_messages_holds(model_dir: Path, form: Form) -> None:
    limit = 2**16
    async with stack(model_dir, max_message_bytes=limit) as made:
        made.say("ok")
        for num_bytes in (limit, 4 * 2**20):
            chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="a" * num_bytes)])
            for method, request in (("Chat", chat), ("ChatUnary", pb.ChatUnaryRequest(request=chat))):
                ended = await call(made.http, form, method, request)
                assert ended.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
                assert str(limit) in ended.message
        assert made.scheduler.requests == []
        await still_answers(made)


@in_loop
async def test_fields_of_newer_clients_are_passed_over(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("ok")
        body = {"request": {"messages": [{"role": "user", "content": "hi", "mood": 3}], "newer": {"a": []}}}
        answer = await made.http.post(path_of("ChatUnary"), json=body)
        assert answer.json()["choices"][0]["content"]["text"] == "ok"


@in_loop
async def test_any_bytes_leave_the_router_alive(model_dir: Path) -> None:
    chance = random.Random(20)
    async with stack(model_dir) as made:
        for _ in range(60):
            form, body = chance.choice(list(Form)), chance.randbytes(chance.randrange(40))
            if chance.random() < 0.5:  # most of a request
                body = PROTO[: chance.randrange(len(PROTO))] + body
            for method in ("Chat", "Tokenize"):
                content = frame(body, chance.choice((0, 0, 0, 1, 2))) if chance.random() < 0.7 else body
                answer = await send(made, form.content_type(streaming=method == "Chat"), content, method)
                assert answer.status_code < 500
        await still_answers(made)
