"""A router's rules made from its options: gate, admission and TLS, kept up to date with their files.

Knows which options mean which rules; decides nothing itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from octavo.addresses import is_local_host
from octavo.tls import ServerTls, TlsFiles
from router.access.admission import Admission
from router.access.gate import Gate
from router.access.keyring import Keyring
from router.access.networks import NetworkRules, parse_networks
from router.access.options import AccessOptions
from router.errors import RouterError

REFRESH_S = 1.0
"""How often files of keys and certificates are looked at."""


class Access:
    """Everything of one router. `tls` is None where the public ports are plain."""

    def __init__(self, options: AccessOptions, on_refusal: Callable[[RouterError], None] = lambda error: None) -> None:
        """Read the files; `on_refusal` is told of those whom the gate turns away. Raises StartError naming option and
        file.
        """
        self.keyring = Keyring(options.api_key, options.key_file)
        networks = NetworkRules(parse_networks(options.allow_networks), parse_networks(options.trusted_proxies))
        self.gate = Gate(self.keyring, networks, on_refusal)
        self.admission = Admission(options, self.keyring)
        files = TlsFiles(options.tls_cert, options.tls_key, options.tls_client_ca)
        self.tls = None if files.cert is None else ServerTls(files)

    def refresh(self) -> None:
        """Take what has changed in the files."""
        self.keyring.refresh()
        if self.tls is not None:
            self.tls.refresh()

    async def refresh_loop(self) -> None:
        """Refresh until cancelled."""
        while True:
            await asyncio.sleep(REFRESH_S)
            # Small files, and read only when they changed.
            self.refresh()


def exposures(options: AccessOptions, host: str, token_listen: str) -> list[str]:
    """What strangers on the network could do, a sentence each; none for a router that this machine alone reaches."""
    found: list[str] = []
    if not is_local_host(host):
        if not options.asks_for_keys and options.tls_client_ca is None:
            reach = "the networks of --allow-networks" if options.allow_networks else "whoever reaches it"
            found.append(
                f"--host {host}: HTTP and gRPC are open to {reach} without a key: generation, the list of models, "
                "metrics and reflection; set OCTAVO_API_KEY or --key-file, or listen on 127.0.0.1"
            )
        if options.tls_cert is None:
            read = "keys, prompts and answers" if options.asks_for_keys else "prompts and answers"
            found.append(
                f"--host {host}: without --tls-cert and --tls-key {read} can be read on the way; give them, or put a "
                "proxy with TLS in front"
            )
    is_plain = not options.wants_curve(token_listen)
    if token_listen.startswith("tcp://") and is_plain and not is_local_host(_host_of(token_listen)):
        found.append(
            f"--token-listen {token_listen}: tokens come in unencrypted, and whoever reaches the port can send some; "
            "leave --zmq-curve at auto"
        )
    return found


def _host_of(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://").rpartition(":")[0]
