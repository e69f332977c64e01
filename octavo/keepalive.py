"""How a gRPC peer is noticed whose machine has vanished or whose process stands still. Knows gRPC's options alone."""

from __future__ import annotations


def keepalive_options(interval_s: float, timeout_s: float) -> list[tuple[str, int]]:
    """Options of a channel or a server: a ping after so much silence, and the connection's end where no answer comes.

    gRPC waits for the answer to a ping by an option of its own, a minute unless it is told, and the timeout of the
    keepalive ends nothing before that.
    """
    return [
        ("grpc.keepalive_time_ms", round(interval_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(timeout_s * 1000)),
        ("grpc.http2.ping_timeout_ms", round(timeout_s * 1000)),
    ]
