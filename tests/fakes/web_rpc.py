"""Calls of the public service over Connect and gRPC-Web, framed by hand: what is on the wire, and no client library.

A `Form` is one way of saying the same call; what comes back is messages and an end, whatever the form.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from urllib.parse import unquote

import httpx2
from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc import status_pb2

from octavo.v1 import inference_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"]

# Connect's names of gRPC's codes, as its specification lists them.
_CODES = {
    "canceled": 1,
    "unknown": 2,
    "invalid_argument": 3,
    "deadline_exceeded": 4,
    "not_found": 5,
    "permission_denied": 7,
    "resource_exhausted": 8,
    "unimplemented": 12,
    "internal": 13,
    "unavailable": 14,
    "unauthenticated": 16,
}


class Form(Enum):
    """Protocol and encoding."""

    CONNECT_JSON = ("connect", "json")
    CONNECT_PROTO = ("connect", "proto")
    WEB_JSON = ("web", "json")
    WEB_PROTO = ("web", "proto")
    WEB_TEXT = ("text", "proto")

    @property
    def protocol(self) -> str:
        return self.value[0]

    @property
    def encoding(self) -> str:
        return self.value[1]

    def content_type(self, *, streaming: bool) -> str:
        if self.protocol == "connect":
            return f"application/{'connect+' if streaming else ''}{self.encoding}"
        return f"application/grpc-web{'-text' if self.protocol == 'text' else ''}+{self.encoding}"

    def is_framed(self, method: str) -> bool:
        return self.protocol != "connect" or SERVICE.methods_by_name[method].server_streaming

    def timeout_header(self, milliseconds: int) -> dict[str, str]:
        if self.protocol == "connect":
            return {"connect-timeout-ms": str(milliseconds)}
        return {"grpc-timeout": f"{milliseconds}m"}


@dataclass
class Ended:
    """How a call ended: code 0 where it went well, and the packed details of its status."""

    messages: list[Any] = field(default_factory=list)
    code: int = 0
    message: str = ""
    details: list[tuple[str, bytes]] = field(default_factory=list)
    headers: Mapping[str, str] = field(default_factory=dict)


def path_of(method: str) -> str:
    return f"/{SERVICE.full_name}/{method}"


def frame(payload: bytes, flags: int = 0) -> bytes:
    return bytes([flags]) + len(payload).to_bytes(4, "big") + payload


def body_of(form: Form, method: str, request: Message) -> bytes:
    payload = (
        json.dumps(json_format.MessageToDict(request)).encode()
        if form.encoding == "json"
        else request.SerializeToString()
    )
    framed = frame(payload) if form.is_framed(method) else payload
    return base64.b64encode(framed) if form.protocol == "text" else framed


def stream(
    http: httpx2.AsyncClient, form: Form, method: str, request: Message, headers: Mapping[str, str] | None = None
) -> Any:
    """The open response of a call, as an async context manager."""
    streaming = SERVICE.methods_by_name[method].server_streaming
    named = {"content-type": form.content_type(streaming=streaming), **(headers or {})}
    return http.stream("POST", path_of(method), content=body_of(form, method, request), headers=named)


async def call(
    http: httpx2.AsyncClient, form: Form, method: str, request: Message, headers: Mapping[str, str] | None = None
) -> Ended:
    """The whole call."""
    async with stream(http, form, method, request, headers) as response:
        return await read(form, method, response)


async def read(form: Form, method: str, response: httpx2.Response) -> Ended:
    """Everything of a response, with its end."""
    ended = Ended(headers=response.headers)
    if not form.is_framed(method):
        body = await response.aread()
        if response.status_code == 200:
            ended.messages.append(_message(form, method, body))
        else:
            _end_as_connect(ended, json.loads(body))
        return ended
    assert response.status_code == 200, (response.status_code, await response.aread())
    if "grpc-status" in response.headers:  # a refusal before anything was written has its status in the headers
        _end_as_grpc(ended, dict(response.headers))
        return ended
    async for flags, payload in frames(form, response):
        if flags == 0:
            ended.messages.append(_message(form, method, payload))
        elif form.protocol == "connect":
            assert flags == 2
            _end_as_connect(ended, json.loads(payload).get("error"))
        else:
            assert flags == 0x80
            lines = payload.decode().splitlines()
            _end_as_grpc(ended, {name: value.strip() for name, _, value in (line.partition(":") for line in lines)})
    return ended


async def frames(form: Form, response: httpx2.Response) -> AsyncIterator[tuple[int, bytes]]:
    """(flags, payload) of each frame, as it comes."""
    rest, coded = b"", b""
    async for piece in response.aiter_bytes():
        if form.protocol == "text":
            coded += piece
            while len(coded) >= 4:  # pieces are padded each for itself
                rest += base64.b64decode(coded[:4])
                coded = coded[4:]
        else:
            rest += piece
        while len(rest) >= 5 and len(rest) >= 5 + int.from_bytes(rest[1:5], "big"):
            end = 5 + int.from_bytes(rest[1:5], "big")
            yield rest[0], rest[5:end]
            rest = rest[end:]
    assert not rest
    assert not coded


def _message(form: Form, method: str, payload: bytes) -> Any:
    message = getattr(pb, SERVICE.methods_by_name[method].output_type.name)()
    if form.encoding == "json":
        return json_format.Parse(payload, message)
    message.ParseFromString(payload)
    return message


def _end_as_connect(ended: Ended, error: Mapping[str, Any] | None) -> None:
    if error is not None:
        ended.code, ended.message = _CODES[error["code"]], error["message"]
        ended.details = [
            (one["type"], base64.b64decode(one["value"] + "==", altchars=None)) for one in error.get("details", ())
        ]


def _end_as_grpc(ended: Ended, trailers: Mapping[str, str]) -> None:
    ended.code, ended.message = int(trailers["grpc-status"]), unquote(trailers.get("grpc-message", ""))
    if packed := trailers.get("grpc-status-details-bin"):
        status = status_pb2.Status.FromString(base64.b64decode(packed + "=="))
        assert (status.code, status.message) == (ended.code, ended.message)
        ended.details = [(one.type_url.rpartition("/")[2], one.value) for one in status.details]
