"""Options that every process of the stack has, said once: how it logs, what it shows, whom it tells.

Each function makes a field for a config class. Knows options; must not know which processes exist.
"""

from __future__ import annotations

from octavo.options import Limits, option

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
