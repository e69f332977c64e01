"""Logging: one line a record on standard error, with the time, the process and the level.

Knows how a line looks, so that the supervisor can tell a child's log lines from its other output.
"""

from __future__ import annotations

import logging
import re
import sys

NAME_WIDTH = 10

_LOG_LINE = re.compile(r"\d\d:\d\d:\d\d\.\d{3} ")


class _LineFormatter(logging.Formatter):
    """`12:03:04.567 worker     INFO    message`; later lines of a record are indented."""

    def __init__(self, process_name: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03d {process_name:<{NAME_WIDTH}} %(levelname)-7s %(message)s", "%H:%M:%S"
        )

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", "\n    ")


def setup_logging(process_name: str, level: str = "info") -> None:
    """Send the root logger's records to standard error, as lines that carry the process's name.

    Libraries speak from `warning` on; ours from `level`. Safe to call again: the last call holds.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter(process_name))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(logging.WARNING, getattr(logging, level.upper())))
    for package in ("octavo", "router", "scheduler_svc", "worker_svc", "kernels"):
        logging.getLogger(package).setLevel(level.upper())


def is_log_line(line: str) -> bool:
    """Whether the line was written by a logger set up here, and so names its process already."""
    return _LOG_LINE.match(line) is not None
