"""HTTP/1.1 for measuring: POST with a JSON body, the answer whole or as a stream of server-sent events.

A pool of kept connections over asyncio's streams, in place of an HTTP library: a client that measures must cost little,
and the base install has none. Speaks no proxies, redirects or compression, which a benchmark would not want.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from octavo.bench.records import AskError

_MOST_LINE_BYTES = 1 << 22
_READ_BYTES = 1 << 16
_MOST_QUOTED_CHARS = 300


@dataclass(frozen=True)
class Origin:
    """Where a server is: of `https://host:port/base`, its parts."""

    host: str
    port: int
    path: str
    is_secure: bool

    @classmethod
    def parse(cls, url: str) -> Origin:
        """Raises ValueError for what is no http or https URL."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no URL such as http://127.0.0.1:8000")
        is_secure = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if is_secure else 80), parts.path.rstrip("/"), is_secure)


@dataclass
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    was_used: bool = False


@dataclass(frozen=True)
class _Head:
    status: int
    headers: Mapping[str, str]


class HttpClient:
    """Asks one origin. As many connections as requests are open at once; kept for the next ones."""

    def __init__(self, origin: Origin, headers: Mapping[str, str], tls: ssl.SSLContext | None) -> None:
        self._origin = origin
        self._tls = (tls or ssl.create_default_context()) if origin.is_secure else None
        lines = {"Host": f"{origin.host}:{origin.port}", "Content-Type": "application/json", **headers}
        self._header_lines = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[_Connection] = []

    async def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON answer to a POST, or to a GET where there is no body. Raises AskError."""
        async with aclosing(self._pieces(path, body)) as pieces:
            answer = b"".join([piece async for piece in pieces])
        try:
            return json.loads(answer)
        except ValueError:
            raise AskError("not JSON", f"{path} answered {_quoted(answer)}") from None

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        """The data of each server-sent event of the answer to a POST. Raises AskError."""
        rest = b""
        async with aclosing(self._pieces(path, body)) as pieces:
            async for piece in pieces:
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:"):
                        yield line[5:].strip()
        if rest.startswith(b"data:"):
            yield rest[5:].strip()

    def close(self) -> None:
        """Close the kept connections."""
        while self._idle:
            self._idle.pop().writer.close()

    async def _pieces(self, path: str, body: Mapping[str, Any] | None) -> AsyncGenerator[bytes, None]:
        """The body of a successful answer, as it comes. A connection goes back only after a whole answer."""
        content = b"" if body is None else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        message = f"{method} {self._origin.path}{path} HTTP/1.1\r\n{self._header_lines}"
        message += f"Content-Length: {len(content)}\r\n\r\n"
        connection = None
        try:
            connection, head = await self._send(message.encode("latin-1") + content)
            pieces = _body(connection.reader, head)
            if head.status != 200:
                answer = b"".join([piece async for piece in pieces])
                raise AskError(f"HTTP {head.status}", f"{path} answered {_quoted(answer)}")
            async for piece in pieces:
                yield piece
            if head.headers.get("connection", "").lower() != "close" and _has_length(head):
                self._idle.append(connection)
                connection = None
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            raise AskError("connection", f"{self._origin.host}:{self._origin.port}: {_cause(error)}") from None
        finally:
            if connection is not None:
                connection.writer.close()

    async def _send(self, message: bytes) -> tuple[_Connection, _Head]:
        """Send on a kept connection, or on a new one where none is kept or the server has closed it meanwhile."""
        while True:
            connection = self._idle.pop() if self._idle else await self._connect()
            try:
                connection.writer.write(message)
                await connection.writer.drain()
                head = await _read_head(connection.reader)
            except (OSError, asyncio.IncompleteReadError) as error:
                connection.writer.close()
                was_kept_too_long = isinstance(error, ConnectionError) or not getattr(error, "partial", b"x")
                if not (connection.was_used and was_kept_too_long):
                    raise
            except BaseException:
                connection.writer.close()
                raise
            else:
                connection.was_used = True
                return connection, head

    async def _connect(self) -> _Connection:
        reader, writer = await asyncio.open_connection(
            self._origin.host, self._origin.port, ssl=self._tls, limit=_MOST_LINE_BYTES
        )
        return _Connection(reader, writer)


async def _read_head(reader: asyncio.StreamReader) -> _Head:
    """Status line and headers. Raises ValueError for what is no HTTP."""
    status_line, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].decode("latin-1").split("\r\n")
    words = status_line.split(None, 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
        raise ValueError(f"not an HTTP answer: {status_line[:80]!r}")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return _Head(int(words[1]), headers)


async def _body(reader: asyncio.StreamReader, head: _Head) -> AsyncIterator[bytes]:
    if head.headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        while await reader.readuntil(b"\r\n") != b"\r\n":  # trailers
            pass
    elif (length := head.headers.get("content-length")) is not None:
        if int(length):
            yield await reader.readexactly(int(length))
    else:
        while piece := await reader.read(_READ_BYTES):
            yield piece


def _has_length(head: _Head) -> bool:
    return "content-length" in head.headers or "transfer-encoding" in head.headers


def _quoted(answer: bytes) -> str:
    """What a server said, its message alone where it is an error in OpenAI's form."""
    text = answer.decode("utf-8", "replace").strip()
    try:
        error = json.loads(text)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        pass
    return text[:_MOST_QUOTED_CHARS] or "nothing"


def _cause(error: Exception) -> str:
    if isinstance(error, asyncio.IncompleteReadError):
        return "the answer ended in its middle"
    return str(error) or type(error).__name__
