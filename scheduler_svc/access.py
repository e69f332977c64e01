"""Who may talk to the scheduler: where it listens, with which certificates, and what each certificate is good for.

Knows addresses, TLS and the names of methods. Must not know what the methods do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from octavo.addresses import grpc_address, is_local_host
from octavo.grpc_guard import Context, Handler, guarded
from octavo.process import StartError
from octavo.tls import ServerTls, internal_files
from scheduler_svc.config import SchedulerConfig

ROLES: Mapping[str, str] = {
    "/octavo.internal.v1.SchedulerService/Watch": "octavo-router",
    "/octavo.internal.v1.SchedulerService/Generate": "octavo-router",
    "/octavo.internal.v1.SchedulerService/Attach": "octavo-worker",
}
"""Which role calls which method; every other one of our own is an operator's."""

OPERATOR = "octavo-operator"
_REFRESH_S = 1.0
_OWN = "/octavo.internal.v1."


def server_tls(config: SchedulerConfig) -> ServerTls | None:
    """The TLS of `--internal-tls-*`, in which both sides show certificates. Raises StartError."""
    if config.internal_tls_cert is None:
        return None
    return ServerTls(internal_files(config.internal_tls_cert, config.internal_tls_key, config.internal_tls_ca))


def listen(server: grpc.aio.Server, config: SchedulerConfig, tls: ServerTls | None) -> int:
    """Bind the server; returns its port. Raises StartError when it cannot listen there."""
    address = grpc_address(config.host, config.port)
    try:
        if tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, tls.credentials())
    except RuntimeError as error:
        raise StartError(
            f"the scheduler cannot listen on {address} ({error}); choose another --host or --port"
        ) from error


async def refreshing(tls: ServerTls | None) -> None:
    """Takes changed certificate files until cancelled; ends at once without TLS."""
    while tls is not None:
        await asyncio.sleep(_REFRESH_S)
        tls.refresh()


def exposures(config: SchedulerConfig) -> list[str]:
    """What strangers on the network could do, a sentence each."""
    if is_local_host(config.host) or config.has_internal_tls:
        return []
    return [
        f"--host {config.host}: whoever reaches port {config.port} can generate as any tenant, attach as a worker and "
        "read prompts, cancel and drain; give --internal-tls-cert, --internal-tls-key and --internal-tls-ca to all "
        "processes, or keep the port inside a network of their own"
    ]


class RoleGate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Holds certificates to the roles they name. One that names no role is good for all of them.

    A role is the common name of a certificate, or one of its DNS names.
    """

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Handler]], details: Any) -> Handler:
        handler = await continuation(details)
        if handler is None or not details.method.startswith(_OWN):
            return handler
        wanted = ROLES.get(details.method, OPERATOR)

        async def check(context: Context) -> None:
            named = roles_of(context.auth_context())
            if named and wanted not in named:
                await context.abort(
                    grpc.StatusCode.PERMISSION_DENIED,
                    f"{details.method} is for certificates of {wanted}, this one is of {', '.join(sorted(named))}",
                )

        return guarded(handler, check)


def roles_of(auth_context: Mapping[str, Any]) -> frozenset[str]:
    """The roles that a peer's certificate names."""
    names = {
        name.decode("utf-8", "replace")
        for key in ("x509_common_name", "x509_subject_alternative_name")
        for name in auth_context.get(key) or ()
    }
    return frozenset(names & {OPERATOR, *ROLES.values()})
