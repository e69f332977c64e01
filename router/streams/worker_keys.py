"""Who may push tokens: answers ZeroMQ's authentication requests (ZAP, RFC 27) for one context by a set of CURVE keys.

Knows keys and ZAP's frames; knows no tokens. A key that is not known is left without an answer rather than refused: a
worker may connect a moment before the scheduler names its key, and libzmq never tries again after a refusal, while an
unanswered handshake ends by itself and is begun anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import zmq
import zmq.asyncio
from zmq.utils import z85

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"octavo"

# Handshakes kept waiting for their key to become known; beyond that the oldest is forgotten, and ends by time.
_MOST_PENDING = 256

_NUM_FRAMES = 9


class WorkerKeys:
    """The ZAP handler of one ZeroMQ context. Create it before the socket it guards is bound."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ENDPOINT)
        self._known: frozenset[bytes] = frozenset()
        self._pending: list[Sequence[bytes]] = []

    @property
    def num_pending(self) -> int:
        """Handshakes that wait for their key to become known."""
        return len(self._pending)

    def authorise(self, keys: Iterable[str]) -> None:
        """From now on exactly these keys (Z85) are let in; connections that stand are not touched."""
        self._known = frozenset(map(_decode, keys)) - {b""}
        waiting, self._pending = self._pending, []
        for request in waiting:
            self._answer(request)

    async def run(self) -> None:
        """Answer until cancelled."""
        while True:
            self._answer(await self._socket.recv_multipart())

    def close(self) -> None:
        self._socket.close()

    def _answer(self, request: Sequence[bytes]) -> None:
        """ROUTER shows a request as caller, empty, version, id, domain, address, identity, mechanism, credentials."""
        if len(request) != _NUM_FRAMES or request[7] != b"CURVE":
            return
        caller, _, version, request_id = request[:4]
        if request[-1] in self._known:
            # Sent at once. Where the handshake has ended meanwhile, ROUTER drops what has no receiver.
            self._socket.send_multipart([caller, b"", version, request_id, b"200", b"OK", b"", b""])
            return
        self._pending.append(request)
        del self._pending[:-_MOST_PENDING]


def _decode(key: str) -> bytes:
    """The key's 32 bytes; none for what is no Z85."""
    with contextlib.suppress(ValueError):
        return z85.decode(key)
    return b""
