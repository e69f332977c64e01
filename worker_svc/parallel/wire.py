"""Messages between ranks: length-prefixed protobuf on a TCP connection. Knows sockets; no ranks."""

from __future__ import annotations

import socket
import struct
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

M = TypeVar("M", bound=Message)

_LENGTH = struct.Struct(">I")
# A plan carries at most every slot's prompt; anything longer is no message of ours.
_MAX_BYTES = 2**30


class LinkEnded(Exception):
    """The other side is gone, or does not speak as a rank does."""


def frame(message: Message) -> bytes:
    """The message as it is sent."""
    data = message.SerializeToString()
    return _LENGTH.pack(len(data)) + data


def receive(connection: socket.socket, kind: type[M], max_bytes: int = _MAX_BYTES) -> M:
    """The next message. Raises LinkEnded when there is none, or it is no message of that kind."""
    try:
        (num_bytes,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
        if num_bytes > max_bytes:
            raise LinkEnded(f"a message of {num_bytes} bytes, more than {max_bytes}")
        return kind.FromString(_exactly(connection, num_bytes))
    except (OSError, DecodeError) as error:
        raise LinkEnded(str(error)) from error


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        piece = connection.recv(min(num_bytes - len(data), 1 << 20))
        if not piece:
            raise LinkEnded("the connection has ended")
        data += piece
    return bytes(data)
