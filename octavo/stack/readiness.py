"""Asks a router whether a token can be produced now: `GET /ready`, 200 or 503, with the start's phases as JSON.

    {"ready": false, "phases": [{"process": "worker", "name": "weights", "seconds": 0.4, "ended": false,
                                 "done": 12, "total": 272}]}

Speaks the few lines of HTTP it needs itself, so that the supervisor needs no HTTP library.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

_MOST_BODY_BYTES = 1 << 20


@dataclass(frozen=True)
class Readiness:
    """One answer of a router; `phase` is the running one, in words, with its counts where it counts."""

    ready: bool
    phase: str = ""
    done: int = 0
    total: int = 0
    waiting_for: frozenset[str] = frozenset()
    """Models of which no token can be produced yet."""


async def ask(host: str, port: int, timeout_s: float = 2.0) -> Readiness | None:
    """One answer, or None where nobody answers in time or not in these words."""
    try:
        async with asyncio.timeout(timeout_s):
            status, body = await _get(host, port, "/ready")
            answer = json.loads(body)
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
        return None
    if not isinstance(answer, dict):
        return None
    return _read(status, answer)


async def _get(host: str, port: int, path: str) -> tuple[int, bytes]:
    """Status and body. Raises ValueError for an answer that is no HTTP, OSError where none listens."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        # HTTP/1.0: the body ends with the connection, and comes in one piece.
        writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\n\r\n".encode("ascii"))
        await writer.drain()
        answer = await reader.read(_MOST_BODY_BYTES)
        while more := await reader.read(_MOST_BODY_BYTES):
            answer += more
            if len(answer) > _MOST_BODY_BYTES:
                raise ValueError(f"the answer to {path} is over {_MOST_BODY_BYTES} bytes")
    finally:
        writer.close()
    head, separator, body = answer.partition(b"\r\n\r\n")
    words = head.split(None, 2)
    if not separator or len(words) < 2 or not words[0].startswith(b"HTTP/"):
        raise ValueError("not an HTTP answer")
    return int(words[1]), body


def _read(status: int, answer: dict[str, Any]) -> Readiness:
    phases = [phase for phase in answer.get("phases") or [] if isinstance(phase, dict)]
    running = [phase for phase in phases if not phase.get("ended")]
    ready = status == 200 and answer.get("ready") is True
    waiting_for = frozenset(name for name, reason in dict(answer.get("reasons") or {}).items() if reason)
    if not running:
        return Readiness(ready, waiting_for=waiting_for)
    last = running[-1]
    done, total = int(last.get("done") or 0), int(last.get("total") or 0)
    return Readiness(ready, str(last.get("name", "")), done, total, waiting_for)
