"""Options that processes of the stack have in common, said once: how they log and trace, what they show each other.

Parts of their config classes, behind whose own options they stand. Knows options; must not know which processes exist.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.options import LOG_LEVELS, Limits, OptionError, option

LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, kw_only=True)
class InternalTlsOptions:
    """What a process shows the others of the stack."""

    internal_tls_cert: str | None = option(
        None,
        "PEM certificate chain that this process shows to the others of the stack; with --internal-tls-key and "
        "--internal-tls-ca, router, scheduler and workers talk to nobody without one.",
    )
    internal_tls_key: str | None = option(None, "PEM private key of --internal-tls-cert.")
    internal_tls_ca: str | None = option(
        None, "PEM certificates of the CA that the certificates of the stack's processes come from."
    )

    @property
    def has_internal_tls(self) -> bool:
        """Whether the processes of the stack talk to each other over TLS."""
        return self.internal_tls_cert is not None

    def check_internal_tls(self) -> None:
        """Raise OptionError unless all three files are given, or none."""
        check_mutual_options("--internal-tls", self.internal_tls_cert, self.internal_tls_key, self.internal_tls_ca)


@dataclass(frozen=True, kw_only=True)
class ObservedOptions:
    """How a process logs, and whom it tells of its spans."""

    otlp_endpoint: str | None = option(
        None, "OpenTelemetry collector that spans are sent to over gRPC, as http://host:4317; unset, none are made."
    )
    otlp_sampling_ratio: float = option(
        1.0,
        "Share of requests that are traced; one that comes with a traceparent follows what that says.",
        limits=Limits(0, 1),
    )
    log_format: str = option(
        "text", "How log records are written: text, or one JSON object a line.", choices=LOG_FORMATS
    )
    log_level: str = option("info", "Least serious messages that are logged.", choices=LOG_LEVELS)


@dataclass(frozen=True, kw_only=True)
class ScrapedOptions:
    """Where a process without a public port shows its metrics."""

    metrics_host: str = option("127.0.0.1", "Address on which the process answers GET /metrics.")
    metrics_port: int = option(
        0, "Port on which the process answers GET /metrics; 0 picks a free one.", limits=Limits(0, 65535)
    )


def check_server_options(prefix: str, cert: str | None, key: str | None, ca: str | None, ca_flag: str) -> None:
    """Raise OptionError unless certificate and key are given together, and a CA only with them."""
    if (cert is None) != (key is None):
        given, missing = (("cert", "key"), ("key", "cert"))[cert is None]
        value = key if cert is None else cert
        raise OptionError(
            f"{prefix}-{given}", value, f"{prefix}-{missing} is missing", "Give both files, or neither for no TLS"
        )
    if ca is not None and cert is None:
        raise OptionError(ca_flag, ca, f"{prefix}-cert and {prefix}-key are missing", "Give all three")


def check_mutual_options(prefix: str, cert: str | None, key: str | None, ca: str | None) -> None:
    """Raise OptionError unless all three files are given, or none: both sides show a certificate of that CA."""
    given = {"cert": cert, "key": key, "ca": ca}
    missing = [name for name, path in given.items() if path is None]
    if missing and len(missing) < len(given):
        raise OptionError(
            f"{prefix}-{missing[0]}", "unset", "the other files of the same TLS are given", "Give all three, or none"
        )
