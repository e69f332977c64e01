"""Checks of the ports the start wants. Pure functions over facts."""

from __future__ import annotations

from octavo.checks.types import Check, Facts, Finding, PortFacts, Severity


def ports_free(facts: Facts) -> Finding | None:
    if not facts.ports:
        return None
    wanted = ", ".join(f"{port.host}:{port.port} ({port.flag})" for port in facts.ports)
    taken = [port for port in facts.ports if port.in_use]
    if not taken:
        return Finding("ports", Severity.OK, f"{wanted} free", "nothing listens there")
    flags = " or ".join(port.flag for port in taken)
    return Finding(
        "ports",
        Severity.FAILURE,
        "; ".join(f"{port.host}:{port.port} ({port.flag}) is taken by {_owner(port)}" for port in taken),
        "a port that nothing else listens on",
        f"Stop it, or choose another port with {flags}",
    )


def addresses_bindable(facts: Facts) -> Finding | None:
    barred = [port for port in facts.ports if port.error is not None]
    if not facts.ports:
        return None
    if not barred:
        hosts = ", ".join(sorted({port.host for port in facts.ports}))
        return Finding("addresses", Severity.OK, hosts, "addresses of this machine")
    return Finding(
        "addresses",
        Severity.FAILURE,
        "; ".join(f"{port.host}:{port.port} ({port.flag}): {port.error}" for port in barred),
        "an address of this machine and a port this user may bind",
        "Give --host an address of this machine (127.0.0.1, 0.0.0.0) and ports above 1023",
    )


def _owner(port: PortFacts) -> str:
    return port.owner or "a process this user cannot see"


CHECKS = (
    Check(
        "ports",
        "The ports are free",
        "The finding names the process that listens there, where the system shows it: stop it, or choose other "
        "ports with `--http-port` and `--grpc-port` (0 picks free ones).",
        ports_free,
    ),
    Check(
        "addresses",
        "The addresses can be bound",
        "`--host` must be an address of this machine: `127.0.0.1` for this machine alone, `0.0.0.0` for all its "
        "interfaces. Ports below 1024 need privileges.",
        addresses_bindable,
    ),
)
