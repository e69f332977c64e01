"""Log lines as JSON."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator

import pytest

from octavo.logs import is_log_line, setup_logging


@pytest.fixture(autouse=True)
def _logging_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_json_line_says_all_that_a_record_knows(capfd: pytest.CaptureFixture[str]) -> None:
    setup_logging("router", "info", "json")
    logging.getLogger("router.x").warning('two\nlines and "quotes" of %s', "ünï", extra={"request_id": "r-1"})
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("octavo").exception("a defect")
    first, second = capfd.readouterr().err.splitlines()
    assert is_log_line(first)
    said = json.loads(first)
    assert said.pop("time").endswith("Z")
    assert said == {
        "level": "warning",
        "process": "router",
        "pid": os.getpid(),
        "logger": "router.x",
        "message": 'two\nlines and "quotes" of ünï',
        "request_id": "r-1",
    }
    assert "ValueError: broken" in json.loads(second)["exception"]
    assert "request_id" not in json.loads(second)
