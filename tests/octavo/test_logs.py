"""Log lines as JSON."""

from __future__ import annotations

import asyncio
import gc
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


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize("level", ["info", "debug"])
def test_f72_a_defect_is_located_and_its_message_is_for_debugging(
    level: str, log_format: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whoever logs it: our surfaces, the HTTP server, or the event loop for a task that nobody waits for."""
    setup_logging("router", level, log_format)
    canaries = [f"canary-{number}" for number in range(3)]

    def fail() -> None:
        try:
            raise KeyError(canaries[0])
        except KeyError as error:
            raise ValueError(canaries[1]) from error

    for name in ("router.grpc_api", "uvicorn.error"):
        try:
            fail()
        except ValueError:
            logging.getLogger(name).exception("a call failed")

    async def forget() -> None:
        async def crash() -> None:
            raise RuntimeError(canaries[2])

        task = asyncio.ensure_future(crash())
        await asyncio.wait({task})

    asyncio.run(forget())
    gc.collect()
    said = capfd.readouterr().err
    for shown in ("a call failed", "in fail", "KeyError", "ValueError", "Task exception was never", "RuntimeError"):
        assert shown in said
    for canary in canaries:
        assert (canary in said) == (level == "debug")
