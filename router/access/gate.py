"""Who gets in: the one question both surfaces ask before anything of a request is read.

Answers with the Caller, which travels with the request's task as `CALLER`: a route that nobody thought of here is
behind the gate as well. Knows keys and addresses; knows no HTTP, no gRPC and no body. What a client presents is never
logged.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from contextvars import ContextVar

from router.access.keyring import ANYBODY, Caller, Keyring
from router.access.networks import Address, NetworkRules
from router.errors import Forbidden, RouterError, Unauthenticated

CALLER: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)
"""Whom the present request is for; set at the gate, read where the request is made."""


class Gate:
    """The rules of one router."""

    def __init__(
        self,
        keyring: Keyring | None = None,
        networks: NetworkRules | None = None,
        on_refusal: Callable[[RouterError], None] = lambda error: None,
    ) -> None:
        """Without keys and networks everybody gets in, as the one tenant. `on_refusal` is told of who does not."""
        self._keyring = keyring or Keyring()
        self._networks = networks or NetworkRules()
        self._on_refusal = on_refusal

    @property
    def asks_for_keys(self) -> bool:
        return self._keyring.asks_for_keys

    @property
    def checks_addresses(self) -> bool:
        return self._networks.checks_addresses

    def check_address(self, peer: Address | None, forwarded_for: Sequence[str]) -> None:
        """Raises Forbidden for a client whose address may not come in."""
        if not self._networks.allows(peer, forwarded_for):
            raise self._told(
                Forbidden("your address may not use this server; its operator's --allow-networks says which may")
            )

    def identify(self, credentials: Sequence[str], *, accept_basic: bool = False) -> Caller:
        """Whom `Authorization` headers stand for. Raises Unauthenticated.

        `accept_basic` takes the key as the password of Basic too, which is what a browser asks a person for.
        """
        if not self._keyring.asks_for_keys:
            return ANYBODY
        if not credentials:
            raise self._told(Unauthenticated("an API key is needed: send it as `Authorization: Bearer KEY`"))
        if len(credentials) > 1:
            raise self._told(Unauthenticated(f"Authorization is given {len(credentials)} times; send the API key once"))
        key = _key_in(credentials[0], accept_basic=accept_basic)
        if key is None:
            raise self._told(Unauthenticated("Authorization holds no API key; send it as `Authorization: Bearer KEY`"))
        caller = self._keyring.find(key)
        if caller is None:
            raise self._told(Unauthenticated("the API key is not known here, or was revoked"))
        return caller

    def _told(self, error: RouterError) -> RouterError:
        self._on_refusal(error)
        return error


def _key_in(credentials: str, *, accept_basic: bool) -> str | None:
    scheme, _, rest = credentials.strip().partition(" ")
    match scheme.lower():
        case "bearer":
            return rest.strip() or None
        case "basic" if accept_basic:
            try:
                decoded = base64.b64decode(rest.strip(), validate=True).decode()
            except (binascii.Error, UnicodeDecodeError):
                return None
            return decoded.partition(":")[2] or None
    return None
