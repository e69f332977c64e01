"""Octavo: serves large language models over gRPC.

`Client`, `AsyncClient` and `Tls` are loaded when they are first named, so that `import octavo` brings nothing else.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.client import AsyncClient, Client, Tls

__all__ = ["AsyncClient", "Client", "Tls"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    from octavo import client

    return getattr(client, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
