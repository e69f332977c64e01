"""One server at a time: started on a free port, timed to its first token, stopped with all its children.

Knows the completions endpoint that every contender has, and nothing of what is measured.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.05
_STOP_S = 20.0


class StartError(Exception):
    """A server ended, or answered nothing in time; the message ends with its last words."""


@dataclass(frozen=True)
class Server:
    """A server that answers."""

    base_url: str
    first_token_s: float
    """From the start of its process to the answer of one token."""


@contextmanager
def serving(
    command: Sequence[str], environment: Mapping[str, str], model: str, log: Path, timeout_s: float
) -> Iterator[Server]:
    """The server until the block ends. Raises StartError when no token comes within `timeout_s`."""
    port = int(command[-1])
    with log.open("wb") as stream:
        begun = time.monotonic()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        base_url = f"http://127.0.0.1:{port}"
        deadline = begun + timeout_s
        while not _produces_a_token(base_url, model, deadline):
            if process.poll() is not None:
                raise StartError(f"it ended with code {process.returncode}: {last_words(log)}")
            if time.monotonic() > deadline:
                raise StartError(f"no token within {timeout_s:.0f} s: {last_words(log)}")
            time.sleep(_POLL_S)
        yield Server(base_url, time.monotonic() - begun)
    finally:
        _stop(process)


def last_words(log: Path, num_lines: int = 3) -> str:
    """The end of a log, on one line."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return " | ".join(line.strip() for line in lines[-num_lines:])[-600:] or "it said nothing"


def _produces_a_token(base_url: str, model: str, deadline: float) -> bool:
    """True once an answer of one token came; False while the port is closed or answers 503, or after the deadline."""
    body = json.dumps({"model": model, "prompt": "The", "max_tokens": 1, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"{base_url}/v1/completions", data=body, headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=max(1.0, deadline - time.monotonic())) as answer:
            return "choices" in json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == 503:
            return False
        said = error.read(500).decode("utf-8", "replace")
        raise StartError(f"it answered {error.code} to one token's request: {said}") from error
    except OSError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server, and whatever of its session outlives it: the next one needs the machine alone."""
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    deadline = time.monotonic() + _STOP_S
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, signal.SIGKILL)
            process.poll()
            time.sleep(_POLL_S)
