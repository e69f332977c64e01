"""How a client shows who it is: an API key with every call, and TLS.

Knows metadata and PEM files; knows no request.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import grpc

from octavo import tls
from octavo.process import StartError

KEY_VARIABLE = "OCTAVO_API_KEY"


@dataclass(frozen=True)
class Tls:
    """PEM files: `ca` to trust in place of the system's CAs; `cert` and `key` to show where the server asks for one."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """For a channel. Raises ValueError, naming the file, where one cannot be used."""
        try:
            return tls.channel_credentials(tls.TlsFiles(self.cert, self.key, self.ca, "--tls", "--tls-ca"))
        except StartError as error:
            raise ValueError(str(error)) from None


def choose_credentials(
    files: Tls | None, credentials: grpc.ChannelCredentials | None
) -> grpc.ChannelCredentials | None:
    """What the channel shows and trusts; None for a plain one. Raises ValueError where both are given."""
    if files is None:
        return credentials
    if credentials is not None:
        raise ValueError("give tls or credentials, not both")
    return files.credentials()


def with_key(stub: Any, api_key: str | None) -> Any:
    """The stub, whose calls carry the key, the given one or OCTAVO_API_KEY's. Raises ValueError for what is none."""
    key = os.environ.get(KEY_VARIABLE) if api_key is None else api_key
    if not key:
        return stub
    if not (key.isascii() and key.isprintable()):
        raise ValueError("an API key is printable ASCII")
    metadata = (("authorization", f"Bearer {key}"),)
    return SimpleNamespace(**{name: functools.partial(getattr(stub, name), metadata=metadata) for name in vars(stub)})
