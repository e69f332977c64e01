"""The public service's messages as JSON (protobuf's JSON mapping), one line each. Knows protobuf and no message.

protobuf's own reader spends microseconds on each value and scans texts with a regular expression, on the loop that all
streams share. So long texts and long lists of integers are set past it, and the number of other values is bounded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from connectrpc.code import Code
from connectrpc.codec import Codec
from connectrpc.errors import ConnectError
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

T = TypeVar("T", bound=Message)
Path: TypeAlias = tuple[str | int, ...]
_Descriptor: TypeAlias = Any  # the type stubs have two of them

LONG = 1000
"""Characters of a text, or items of a list, from which on it is set past protobuf's reader."""

MOST_VALUES = 50_000
"""Values in one body, those in long lists of integers aside."""

_MOST_SHOWN_CHARS = 300
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_INTEGERS = frozenset(
    (
        FieldDescriptor.TYPE_INT32,
        FieldDescriptor.TYPE_INT64,
        FieldDescriptor.TYPE_UINT32,
        FieldDescriptor.TYPE_UINT64,
        FieldDescriptor.TYPE_SINT32,
        FieldDescriptor.TYPE_SINT64,
    )
)


class JsonCodec(Codec[Any, Any]):
    """Fields that a message does not have are passed over, as those of newer clients are in protobuf's bytes."""

    def name(self) -> str:
        return "json"

    def encode(self, message: Message | bytes) -> bytes:
        """The message's JSON; bytes are JSON already."""
        if isinstance(message, bytes):
            return message
        return _ENCODER.encode(json_format.MessageToDict(message)).encode()

    def decode(self, data: bytes | bytearray, message_class: type[T]) -> T:
        message = message_class()
        try:
            _read(json.loads(data.decode()), message)
        except Exception as error:  # what a client can send is refused by json and protobuf with a dozen types
            reason = ascii(str(error))[1:-1][:_MOST_SHOWN_CHARS]
            raise ConnectError(
                Code.INVALID_ARGUMENT, f"body is no {message.DESCRIPTOR.full_name} in JSON: {reason}"
            ) from None
        return message


@dataclass(frozen=True)
class _Long:
    """A value taken out of a body: the way to its message, its field there, and itself."""

    path: Path
    field: str
    value: str | list[int]


def _read(body: Any, message: Message) -> None:
    found: list[_Long] = []
    if isinstance(body, dict):
        _take_out(body, message.DESCRIPTOR, (), found)
    if _exceeds(body, MOST_VALUES):
        raise ValueError(f"it has more than {MOST_VALUES} values, the limit of JSON; protobuf has none")
    json_format.ParseDict(body, message, ignore_unknown_fields=True)
    for taken in found:
        place: Any = message
        for step in taken.path:
            place = place[step] if isinstance(step, int) else getattr(place, step)
        if isinstance(taken.value, str):
            setattr(place, taken.field, taken.value)
        else:
            getattr(place, taken.field).extend(taken.value)


def _take_out(body: dict[str, Any], descriptor: _Descriptor, path: Path, found: list[_Long]) -> None:
    """Replace what is long by what is short, in the dict itself."""
    for key, value in body.items():
        field = descriptor.fields_by_camelcase_name.get(key) or descriptor.fields_by_name.get(key)
        if field is None:
            continue
        inner = field.message_type
        if inner is not None:
            if not inner.GetOptions().map_entry:
                _take_out_of_messages(value, inner, (*path, field.name), found)
        elif field.type == FieldDescriptor.TYPE_STRING and isinstance(value, str) and len(value) > LONG:
            found.append(_Long(path, field.name, value))
            body[key] = ""
        elif field.type in _INTEGERS and _is_long_list(value):
            found.append(_Long(path, field.name, value))
            body[key] = []


def _take_out_of_messages(value: Any, descriptor: _Descriptor, path: Path, found: list[_Long]) -> None:
    if isinstance(value, dict):
        _take_out(value, descriptor, path, found)
    elif isinstance(value, list):
        for index, item in enumerate(value[:MOST_VALUES]):
            if isinstance(item, dict):
                _take_out(item, descriptor, (*path, index), found)


def _is_long_list(value: Any) -> bool:
    return isinstance(value, list) and len(value) > LONG and all(type(item) is int for item in value)


def _exceeds(body: Any, most: int) -> bool:
    """Whether there are more values than that, looking at no more."""
    num_values, waiting = 0, [body]
    while waiting:
        value = waiting.pop()
        inner: Iterable[Any] = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        num_values += len(value) if isinstance(value, dict | list) else 0
        if num_values > most:
            return True
        waiting.extend(inner)
    return False
