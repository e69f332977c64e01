"""What holds for every test."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

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
