"""Asking a router for readiness, and drawing what it answers."""

from __future__ import annotations

import asyncio
import io
import json

import pytest

from octavo.stack.console import Console, progress_bar
from octavo.stack.readiness import Readiness, ask

WEIGHTS = {"process": "worker", "name": "weights", "seconds": 0.4, "ended": False, "done": 12, "total": 272}
IMPORT = {"process": "worker", "name": "import", "seconds": 2.0, "ended": True}


async def ask_server(answer: bytes) -> tuple[Readiness | None, bytes]:
    """Serve one answer on a free port, ask it, and return what was made of it and what was asked."""
    asked: list[bytes] = []

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(reply, "127.0.0.1", 0)
    async with server:
        made = await ask("127.0.0.1", server.sockets[0].getsockname()[1], timeout_s=10)
    return made, asked[0]


def http(status: str, body: object) -> bytes:
    return f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n{json.dumps(body)}".encode()


@pytest.mark.parametrize(
    ("answer", "readiness"),
    [
        (http("200 OK", {"ready": True, "phases": [IMPORT]}), Readiness(True)),
        (http("503 No", {"ready": False, "phases": [IMPORT, WEIGHTS]}), Readiness(False, "weights", 12, 272)),
        (http("503 No", {"ready": True, "phases": []}), Readiness(False)),
        (http("200 OK", {"ready": False}), Readiness(False)),
        (http("200 OK", ["ready"]), None),
        (b"HTTP/1.1 200 OK\r\n\r\nnot json", None),
        (b"SSH-2.0-banner\r\n\r\n", None),
        (b"", None),
    ],
)
def test_an_answer_is_read_or_taken_for_none(answer: bytes, readiness: Readiness | None) -> None:
    made, asked = asyncio.run(ask_server(answer))
    assert made == readiness
    assert asked.startswith(b"GET /ready HTTP/1.0\r\n")


def test_nobody_there_is_no_answer() -> None:
    async def run() -> Readiness | None:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        return await ask("127.0.0.1", port)

    assert asyncio.run(run()) is None


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_status_line_stays_below_the_lines_on_a_terminal() -> None:
    screen = Terminal()
    console = Console(screen)
    console.status("weights 1/2")
    console.child_line("worker", "hello")
    console.close()
    clear = "\r\x1b[K"
    assert screen.getvalue() == f"{clear}weights 1/2{clear}worker     | hello\nweights 1/2{clear}"


def test_no_status_is_written_to_a_file() -> None:
    file = io.StringIO()
    console = Console(file)
    console.status("weights 1/2")
    console.child_line("worker", "12:00:00.000 worker     INFO    hello")
    assert file.getvalue() == "12:00:00.000 worker     INFO    hello\n"


def test_a_bar_fills_with_its_count() -> None:
    assert progress_bar("weights", 0, 4, width=4) == "weights   [....]   0/4"
    assert progress_bar("weights", 2, 4, width=4) == "weights   [##..]   2/4"
    assert progress_bar("weights", 9, 4, width=4) == "weights   [####]   9/4"
