"""The responses of a stream: as messages, or as the bytes of messages.

What most tokens make is a delta of text and ids, whose bytes are put together by hand: making a message to serialize
takes several times as long. All else goes through `grpc_wire`, which alone knows what a response holds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

from google.protobuf.message import Message

from octavo.v1 import inference_pb2 as pb
from router.grpc_wire import StreamResponse, write_event
from router.prepared import Prepared
from router.requests import Event, TextDelta


class Responses(Protocol):
    """Makes the responses of one stream."""

    def of(self, event: Event) -> Any:
        """The response that tells an event, as the stream's context takes it."""


ResponsesFactory: TypeAlias = Callable[[type[StreamResponse], Prepared], Responses]


class MessageResponses:
    """Messages, for whoever does not send them as they are."""

    def __init__(self, response_type: type[StreamResponse], prepared: Prepared) -> None:
        self._type = response_type
        self._request_id, self._model = prepared.shown_id, prepared.options.model

    def of(self, event: Event) -> StreamResponse:
        """A message of its own."""
        return write_event(self._type(request_id=self._request_id, model=self._model), event)


class EncodedResponses:
    """Bytes of messages."""

    def __init__(self, response_type: type[StreamResponse], prepared: Prepared) -> None:
        self._messages = MessageResponses(response_type, prepared)
        head = response_type(request_id=prepared.shown_id, model=prepared.options.model)
        self._head = head.SerializeToString() + _tag(head, "delta")

    def of(self, event: Event) -> bytes:
        """What the message serializes to."""
        if type(event) is not TextDelta:
            return self._messages.of(event).SerializeToString()
        index, text, start, ids, logprobs, reasoning, tool_calls = event
        if logprobs or reasoning or tool_calls:
            return self._messages.of(event).SerializeToString()
        delta = _delta(index, text.encode(), start, ids)
        return self._head + _varint(len(delta)) + delta


def _delta(index: int, text: bytes, start: int, ids: tuple[int, ...]) -> bytes:
    """A Delta that has these fields alone. Fields that are zero or empty do not appear."""
    fields = _INDEX + _varint(index) if index else b""
    if text:
        fields += _TEXT + _varint(len(text)) + text
    if start:
        fields += _START + _varint(start)
    if ids:
        packed = _varint(ids[0]) if len(ids) == 1 else b"".join(map(_varint, ids))
        fields += _IDS + _varint(len(packed)) + packed
    return fields


@lru_cache(2**14)
def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first, all bytes but the last marked."""
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


def _tag(message: Message | type[Message], field: str) -> bytes:
    """What stands before a field's value: its number, and how the value is written."""
    descriptor = message.DESCRIPTOR.fields_by_name[field]
    is_number = descriptor.cpp_type == descriptor.CPPTYPE_UINT32 and not descriptor.is_repeated
    return _varint(descriptor.number << 3 | (0 if is_number else 2))


_INDEX, _TEXT, _START, _IDS = (_tag(pb.Delta, name) for name in ("index", "text", "start_index", "token_ids"))
