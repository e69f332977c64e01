"""Options that every process of the stack has, said once: how it logs, what it shows, whom it tells.

Each function makes a field for a config class. Knows options; must not know which processes exist.
"""

from __future__ import annotations

from octavo.options import Limits, OptionError, option

LOG_FORMATS = ("text", "json")


def log_format() -> str:
    """`--log-format`."""
    return option("text", "How log records are written: text, or one JSON object a line.", choices=LOG_FORMATS)


def otlp_endpoint() -> str | None:
    """`--otlp-endpoint`."""
    unset: str | None = None
    return option(
        unset, "OpenTelemetry collector that spans are sent to over gRPC, as http://host:4317; unset, none are made."
    )


def otlp_sampling_ratio() -> float:
    """`--otlp-sampling-ratio`."""
    return option(
        1.0,
        "Share of requests that are traced; one that comes with a traceparent follows what that says.",
        limits=Limits(0, 1),
    )


def metrics_host() -> str:
    """`--metrics-host`."""
    return option("127.0.0.1", "Address on which the process answers GET /metrics.")


def metrics_port() -> int:
    """`--metrics-port`."""
    return option(0, "Port on which the process answers GET /metrics; 0 picks a free one.", limits=Limits(0, 65535))


def internal_tls_cert() -> str | None:
    """`--internal-tls-cert`."""
    unset: str | None = None
    return option(
        unset,
        "PEM certificate chain that this process shows to the others of the stack; with --internal-tls-key and "
        "--internal-tls-ca, router, scheduler and workers talk to nobody without one.",
    )


def internal_tls_key() -> str | None:
    """`--internal-tls-key`."""
    unset: str | None = None
    return option(unset, "PEM private key of --internal-tls-cert.")


def internal_tls_ca() -> str | None:
    """`--internal-tls-ca`."""
    unset: str | None = None
    return option(unset, "PEM certificates of the CA that the certificates of the stack's processes come from.")


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
