"""Server-sent events as clients cut them up: comments in silence, and readers that lose a comment's end."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from router.openai.event_stream import EventStream, as_event
from tests.fakes.router_stack import in_loop


class Connection:
    """What a server wrote, piece by piece; the client stays."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.has_comment = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("nothing wakes it")

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.pieces.append(message["body"])
            if message["body"].endswith(b": waiting\n\n"):
                self.has_comment.set()


def read_whole(pieces: list[bytes]) -> list[str]:
    """The data of every event, by the letter of the format."""
    events = b"".join(pieces).decode().split("\n\n")
    return [line.removeprefix("data: ") for event in events for line in event.split("\n") if line.startswith("data: ")]


def read_stripping(pieces: list[bytes]) -> list[str]:
    """As a reader does that strips each piece as it comes, and knows its events by their being JSON."""
    buffer, found = "", []
    for piece in pieces:
        buffer += piece.decode().strip()
        *whole, buffer = buffer.split("\n\n")
        found += [event.removeprefix("data: ") for event in whole if event.startswith("data: ")]
        data = buffer.removeprefix("data: ")
        with contextlib.suppress(json.JSONDecodeError):
            if data != "[DONE]":
                json.loads(data)
            found.append(data)
            buffer = ""
    return found


@in_loop
async def test_f48_silence_is_filled_by_comments_and_no_event_is_lost_behind_one() -> None:
    connection = Connection()

    @contextlib.asynccontextmanager
    async def chunks() -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        async def run() -> AsyncIterator[dict[str, Any]]:
            for number in range(3):
                yield {"choices": [], "number": number}
                connection.has_comment.clear()
                await connection.has_comment.wait()

        yield run()

    stream = EventStream(chunks(), lambda chunk: [as_event(json.dumps(chunk))], comment_interval_s=0.001)
    await stream({"type": "http"}, connection.receive, connection.send)
    assert any(piece == b": waiting\n\n" for piece in connection.pieces)
    for read in (read_whole, read_stripping):
        *events, last = read(connection.pieces)
        assert [json.loads(event)["number"] for event in events] == [0, 1, 2]
        assert last == "[DONE]"
