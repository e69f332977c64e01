"""The proof that a whole stack serves: `octavo serve` on a tiny random model, asked over gRPC and HTTP, and stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.client import Client
from octavo.commands.doctor_model import write_tiny_model
from octavo.options import secrets_of
from octavo.ports import free_ports
from router.config import RouterConfig

_HOST = "127.0.0.1"
_START_S, _ANSWER_S, _STOP_S = 120.0, 30.0, 30.0
_POLL_S = 0.05
_NUM_TOKENS = 24
_PROMPT = "Four score and seven years ago our fathers brought forth"
_OPTIONS = (
    *("--dtype", "float32", "--max-model-len", "256", "--num-kv-blocks", "64", "--max-num-seqs", "8"),
    *("--num-threads", "1", "--served-model-name", "proof", "--check-laws", "--log-level", "warning"),
)


def prove_stack() -> str:
    """One request through router, scheduler and worker, and again another way. Raises AssertionError."""
    with tempfile.TemporaryDirectory(prefix="octavo-doctor-") as folder:
        model = write_tiny_model(Path(folder))
        begun_s = time.monotonic()
        with _serving(model, Path(folder) / "serve.log") as (http_port, grpc_port):
            ready_s = time.monotonic() - begun_s
            replica = _ask(http_port, grpc_port)
    return (
        f"router, scheduler and {replica} were ready after {ready_s:.1f} s and gave the same {_NUM_TOKENS} tokens "
        "streamed, whole, from the prefix cache and over HTTP; all ended with status 0"
    )


def _ask(http_port: int, grpc_port: int) -> str:
    """Ask in every way; returns the replica's name."""
    options = {"temperature": 0.0, "max_tokens": _NUM_TOKENS, "ignore_eos": True}
    with Client(f"{_HOST}:{grpc_port}", api_key="") as client:
        stream = client.generate(_PROMPT, stream=True, timeout_s=_ANSWER_S, **options)  # type: ignore[call-overload]
        streamed = "".join(delta.text for delta in stream)
        first = stream.result
        whole = client.generate(_PROMPT, timeout_s=_ANSWER_S, **options)  # type: ignore[call-overload]
    receipt = first.choices[0].receipt
    _demand_equal("tokens of the answer", first.usage.completion_tokens, _NUM_TOKENS)
    _demand_equal("the streamed text", streamed, first.choices[0].text)
    _demand_equal("the whole answer's tokens", whole.choices[0].token_ids, first.choices[0].token_ids)
    if not whole.usage.cached_tokens:
        raise AssertionError("the second answer took nothing from the prefix cache")
    body = {"model": "proof", "prompt": _PROMPT, "temperature": 0, "max_tokens": _NUM_TOKENS, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://{_HOST}:{http_port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with _direct().open(request, timeout=_ANSWER_S) as answer:
        _demand_equal("the text over HTTP", json.load(answer)["choices"][0]["text"], streamed)
    return str(receipt.replica)


@contextmanager
def _serving(model: Path, log: Path) -> Iterator[tuple[int, int]]:
    """(HTTP, gRPC) ports of a stack that is ready; stopped afterwards. Raises AssertionError with its last words."""
    http_port, grpc_port = free_ports(2, _HOST)
    ports = ("--http-port", str(http_port), "--grpc-port", str(grpc_port))
    command = (sys.executable, "-m", "octavo", "serve", str(model), *ports, *_OPTIONS)
    secrets = {entry.variable for entry in secrets_of(RouterConfig)}
    environment = {name: value for name, value in os.environ.items() if name not in secrets}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, env=environment
        )
    try:
        _wait_until_ready(process, http_port, log)
        yield http_port, grpc_port
        process.send_signal(signal.SIGINT)
        if status := process.wait(_STOP_S):
            raise AssertionError(f"octavo serve ended with status {status}: {_last_words(log)}")
    finally:
        if process.poll() is None:
            process.kill()  # its children end with it
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"octavo serve ended with status {process.returncode}: {_last_words(log)}")
        try:
            with _direct().open(f"http://{_HOST}:{port}/ready", timeout=5):
                return
        except OSError:  # nobody listens yet, or 503
            time.sleep(_POLL_S)
    raise AssertionError(f"octavo serve was not ready within {_START_S:.0f} s: {_last_words(log)}")


def _direct() -> urllib.request.OpenerDirector:
    """For this machine, whatever proxy the environment names."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return " | ".join(lines[-3:])[-600:] or "it said nothing"


def _demand_equal(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise AssertionError(f"{what}: {found!r}, expected {expected!r}")
