"""uvicorn as a router wants it: signals are the process's, sockets are bound beforehand, requests have bounds.

Knows uvicorn, sockets and the shape of an error; knows no route. uvicorn itself takes heads of any size, and waits for
them, for bodies and for clients that read nothing for as long as a client likes: strangers could fill the memory before
any gate is asked, and hold connections for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import ssl
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from octavo.process import StartError
from router.errors import TooLate
from router.openai.shapes import error_json
from router.sending import DEFAULT_TIMEOUT_S

CLOSING_S = 2.0
"""What connections get to close by themselves once no request is live."""

# More than asyncio reads at once, since what is read with the end of a body counts as head.
MAX_HEAD_BYTES = 512 * 2**10
HEAD_TIMEOUT_S = 30.0
BODY_TIMEOUT_S = 60.0

_BACKLOG = 1024


class QuietServer(uvicorn.Server):
    """uvicorn without its own signal handlers, for this process has one owner of signals, and ticking once a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._asked_to_stop = asyncio.Event()

    def stop(self) -> None:
        """Close idle connections and listen no more; `serve` returns once the rest are done."""
        self.should_exit = True
        self._asked_to_stop.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        tick = 0
        while not await self.on_tick(tick):
            tick += 10  # uvicorn counts tenths of a second
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked_to_stop.wait(), 1.0)


def quiet_server(
    app: ASGIApp,
    tls: ssl.SSLContext | None,
    *,
    head_timeout_s: float = HEAD_TIMEOUT_S,
    body_timeout_s: float = BODY_TIMEOUT_S,
) -> QuietServer:
    """A server of the app, over TLS where there is a context for it."""
    factory = None if tls is None else lambda config, default: tls
    protocol: Any = functools.partial(_BoundedRequests, head_timeout_s, body_timeout_s)
    return QuietServer(
        uvicorn.Config(
            app,
            http=protocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            # Whose word about a client's address is taken is the gate's to say.
            proxy_headers=False,
            ssl_context_factory=factory,
            timeout_graceful_shutdown=round(CLOSING_S),
        )
    )


class _BoundedRequests(HttpToolsProtocol):
    """One connection. The head of a request is all that comes before its body."""

    def __init__(self, head_timeout_s: float, body_timeout_s: float, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._head_timeout_s = head_timeout_s
        self._body_timeout_s = body_timeout_s
        self._in_head = True
        self._num_head_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._answered: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        # uvicorn tells the request that was read last, which may be waiting behind the one that is answered.
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self.send_400_response(f"The head of the request has more than {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._expect_body()
        before = self.cycle
        super().on_headers_complete()
        if before is None or before.response_complete:
            self._answered = self.cycle

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answered = self.pipeline[-1][0]
        super().on_response_complete()

    def on_message_complete(self) -> None:
        self._stop_timer()
        super().on_message_complete()

    def _expect_head(self) -> None:
        self._in_head, self._num_head_bytes = True, 0
        self._start_timer(self._head_timeout_s, self._give_head_up)

    def _expect_body(self) -> None:
        self._start_timer(self._body_timeout_s, self._give_body_up)

    def _start_timer(self, timeout_s: float, act: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(timeout_s, act)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_head_up(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._expect_head()  # the request before it is still being answered
        else:
            self.transport.close()

    def _give_body_up(self) -> None:
        if self.pipeline:
            self._expect_body()  # it is not read while requests before it are answered
            return
        if not self.cycle.response_started:
            self.transport.write(_too_slow(self._body_timeout_s))
        self.transport.close()


def _too_slow(timeout_s: float) -> bytes:
    """The answer to a request whose body did not come, in OpenAI's shape."""
    error = TooLate(f"the body of the request did not come within {timeout_s:g} s (--body-timeout)")
    body = json.dumps(error_json(error)).encode()
    status = HTTPStatus(error.codes.http_status)
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    return f"{head}Connection: close\r\n\r\n".encode() + body


def listen(flag: str, host: str, port: int, send_timeout_s: float = DEFAULT_TIMEOUT_S) -> socket.socket:
    """A listening socket. Raises StartError naming the option.

    Its connections end once a client has taken nothing for so long of what is sent to it; its requests are told so.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio turns Nagle's algorithm off on what is accepted: tokens go out as they come.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # What is accepted inherits it. The system knows what a client has taken; we know what the system has.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(send_timeout_s * 1000))
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise StartError(f"{flag}: {host}:{port} cannot be bound ({error.strerror}); choose another") from None
    listener.listen(_BACKLOG)
    return listener
