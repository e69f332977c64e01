"""The public service's messages as JSON (protobuf's JSON mapping), one line each. Knows protobuf and no message."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from connectrpc.code import Code
from connectrpc.codec import Codec
from connectrpc.errors import ConnectError
from google.protobuf import json_format
from google.protobuf.message import Message

T = TypeVar("T", bound=Message)

_MOST_SHOWN_CHARS = 300
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class JsonCodec(Codec[Any, Any]):
    """Fields that a message does not have are passed over, as those of newer clients are in protobuf's bytes."""

    def name(self) -> str:
        return "json"

    def encode(self, message: Message) -> bytes:
        return _ENCODER.encode(json_format.MessageToDict(message)).encode()

    def decode(self, data: bytes | bytearray, message_class: type[T]) -> T:
        message = message_class()
        try:
            json_format.Parse(bytes(data), message, ignore_unknown_fields=True)
        except Exception as error:  # what a client can send, json and json_format refuse with a dozen types
            reason = ascii(str(error))[1:-1][:_MOST_SHOWN_CHARS]
            raise ConnectError(
                Code.INVALID_ARGUMENT, f"body is no {message.DESCRIPTOR.full_name} in JSON: {reason}"
            ) from None
        return message
