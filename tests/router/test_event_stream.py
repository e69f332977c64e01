"""Server-sent events as clients cut them up: comments in silence, and readers that lose a comment's end."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from router.openai.event_stream import EventStream, as_event
from tests.fakes.router_stack import in_loop

COMMENT = b": waiting\n\n"


class Connection:
    """What a server wrote, piece by piece; the client stays."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self._comments: asyncio.Queue[bytes] = asyncio.Queue()

    async def receive(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("nothing wakes it")

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.pieces.append(message["body"])
            if message["body"] == COMMENT:
                self._comments.put_nowait(COMMENT)

    async def comments(self, number: int) -> None:
        """So many more of them."""
        for _ in range(number):
            await self._comments.get()


def read_whole(reads: list[bytes]) -> list[str]:
    """The data of every event, by the letter of the format."""
    events = b"".join(reads).decode().split("\n\n")
    return [line.removeprefix("data: ") for event in events for line in event.split("\n") if line.startswith("data: ")]


def read_stripping(reads: list[bytes]) -> list[str]:
    """As `vllm bench serve` does (0.32): it strips each read and takes for an event what is whole JSON.

    What is neither a comment nor an event must be JSON there; anything else fails the request.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    buffer, found = "", []
    for read in reads:
        if not (stripped := read.strip()):
            continue
        buffer += decoder.decode(stripped)
        *whole, buffer = buffer.split("\n\n")
        messages = [message.strip() for message in whole if message.strip()]
        if buffer.startswith("data: ") and is_event(buffer.removeprefix("data: ").strip()):
            messages.append(buffer.strip())
            buffer = ""
        found += [message.removeprefix("data: ") for message in messages if not message.startswith(":")]
    assert all(is_event(data) for data in found), found
    return found


def is_event(data: str) -> bool:
    with contextlib.suppress(json.JSONDecodeError):
        return data == "[DONE]" or json.loads(data) is not None
    return False


def reads_of(pieces: list[bytes]) -> Iterator[list[bytes]]:
    """What a client may get at a time: each piece, or any number of them together."""
    for at_once in range(1, len(pieces) + 1):
        for start in range(at_once):
            cuts = [0, *range(start or at_once, len(pieces), at_once), len(pieces)]
            yield [b"".join(pieces[i:j]) for i, j in itertools.pairwise(cuts)]


@pytest.mark.parametrize("num_comments", [1, 3])
@in_loop
async def test_f48_silence_is_filled_by_comments_and_no_event_is_lost_behind_one(num_comments: int) -> None:
    """Silence before the first event, between events and before the last, however a client reads what came."""
    connection = Connection()

    @contextlib.asynccontextmanager
    async def chunks() -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        async def run() -> AsyncIterator[dict[str, Any]]:
            for number in range(3):
                await connection.comments(num_comments)
                yield {"choices": [{"index": 0, "text": "\u00e9 "}], "number": number}
            await connection.comments(num_comments)

        yield run()

    def usage() -> list[str]:
        return [as_event(json.dumps({"choices": [], "number": 3}))]

    def lines(chunk: dict[str, Any]) -> list[str]:
        return [as_event(json.dumps(chunk, ensure_ascii=False))]

    stream = EventStream(chunks(), lines, usage, comment_interval_s=0.001)
    await stream({"type": "http"}, connection.receive, connection.send)
    assert connection.pieces.count(COMMENT) >= 4 * num_comments
    for reads in reads_of(connection.pieces):
        for read in (read_whole, read_stripping):
            *events, last = read(reads)
            assert [json.loads(event)["number"] for event in events] == [0, 1, 2, 3]
            assert last == "[DONE]"
