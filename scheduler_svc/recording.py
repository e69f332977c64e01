"""The flight recorder's file: framing, and the core's plain data as JSON fields. Knows no queue and no decision.

    "octavo-recording\\n" | length, RecordingHeader | length, Record | length, Record | ...      lengths are varints

What the header says of itself decides what the file is good for: `exact_defect`.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from octavo.internal.v1 import recording_pb2 as pb

MAGIC = b"octavo-recording\n"
VERSION = 2

T = TypeVar("T")


class RecordingError(ValueError):
    """A file is no recording, or not one that this version reads."""


@dataclass(frozen=True)
class Recording:
    """A file's content."""

    header: pb.RecordingHeader
    records: tuple[pb.Record, ...]

    @property
    def exact_defect(self) -> str | None:
        """Why the decisions cannot be made again from it; None if they can."""
        return self.header.defect or None


def frame(message: bytes) -> bytes:
    """A message with its length before it."""
    length, prefix = len(message), bytearray()
    if length <= 0x7F:  # nearly all
        return bytes((length,)) + message
    while length > 0x7F:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + message


def write(header: pb.RecordingHeader, records: Iterable[bytes]) -> Iterator[bytes]:
    """The file in pieces; `records` are framed already."""
    yield MAGIC + frame(header.SerializeToString())
    yield from records


def read(data: bytes) -> Recording:
    """A file's content. Raises RecordingError, saying where, for anything else."""
    if not data.startswith(MAGIC):
        raise RecordingError(f"it does not begin with {MAGIC!r}: it is no recording")
    messages = _frames(data, len(MAGIC))
    try:
        header = pb.RecordingHeader.FromString(next(messages, b""))
        if header.version != VERSION:
            raise RecordingError(f"its version is {header.version}; this software reads version {VERSION}")
        return Recording(header, tuple(pb.Record.FromString(message) for message in messages))
    except DecodeError as error:
        raise RecordingError(f"a record cannot be read: {error}") from error


def _frames(data: bytes, offset: int) -> Iterator[bytes]:
    while offset < len(data):
        begin, length, shift = offset, 0, 0
        while True:
            if offset >= len(data) or shift > 28:
                raise RecordingError(f"it is cut off or damaged at byte {begin} of {len(data)}")
            byte = data[offset]
            offset += 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        if offset + length > len(data):
            raise RecordingError(
                f"it is cut off at byte {begin}: a record of {length} bytes, {len(data) - offset} left"
            )
        yield data[offset : offset + length]
        offset += length


def to_fields(value: Any) -> dict[str, str]:
    """Each field of a dataclass as JSON. Enums are written by value."""
    return {field.name: json.dumps(_plain(getattr(value, field.name))) for field in dataclasses.fields(value)}


def from_fields(kind: type[T], fields: Mapping[str, str]) -> T:
    """A dataclass from such fields. Raises RecordingError for one that it does not have, or a bad value."""
    hints = typing.get_type_hints(kind)
    if unknown := sorted(fields.keys() - hints.keys()):
        raise RecordingError(f"{kind.__name__} has no field {', '.join(unknown)}: the recorder's version was another")
    try:
        return kind(**{name: _typed(json.loads(text), hints[name]) for name, text in fields.items()})
    except (TypeError, ValueError) as error:
        raise RecordingError(f"{kind.__name__}: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    return dict(value) if isinstance(value, Mapping) else value


def _typed(value: Any, hint: Any) -> Any:
    return hint(value) if isinstance(hint, type) and issubclass(hint, enum.Enum) else value
