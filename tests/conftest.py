"""What holds for every test."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

# Before torch is imported: threads that wait for others do not spin for long, which on a machine that is busy took
# several times the processor time of the tests themselves.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

_OURS = ("", "octavo", "router", "scheduler_svc", "worker_svc", "kernels")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A command run in this process sets logging up for itself; its handlers must not outlive the test's streams."""
    loggers = [logging.getLogger(name) for name in _OURS]
    before = [(logger, logger.level, logger.handlers[:]) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers
