"""Drives a server with vLLM's own benchmark client, which none of the contenders' authors but one wrote.

One client process serves all contenders. What it measures comes back as `Measurement`; a run that failed, or that took
too long, as `ClientError`.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.comparison.contenders import MODEL_NAME
from benchmarks.comparison.load import OthersLoad
from benchmarks.comparison.serving import last_words
from benchmarks.comparison.workloads import Workload

_IMPORT_S = 180.0
_LOOP = Path(__file__).with_name("client_loop.py")


class ClientError(Exception):
    """A run that gave no numbers, with the client's last words."""


@dataclass(frozen=True)
class Measurement:
    """One workload on one server, as the client saw it."""

    num_completed: int
    num_failed: int
    output_tokens_per_s: float
    mean_ttft_ms: float
    p99_ttft_ms: float
    mean_tpot_ms: float
    p99_itl_ms: float
    seconds: float
    others_cores: float
    """Cores that processes of neither server nor client kept busy meanwhile."""
    errors: tuple[str, ...] = ()
    """What failed requests were told, each once."""


class BenchmarkClient:
    """The client's process; use as a context manager."""

    def __init__(self, python: Path, tokenizer: Path, folder: Path) -> None:
        self._python = python
        self._tokenizer = tokenizer
        self._folder = folder
        self._log = folder / "client.log"
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Import vLLM now, rather than within the first run. Raises ClientError."""
        if self._process is not None:
            return
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(self._python), str(_LOOP)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )
        self._await("ready", _IMPORT_S)

    def stop(self) -> None:
        """End the process; the next run starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def run(self, base_url: str, workload: Workload, scale: float, timeout_s: float) -> Measurement:
        """One workload. Raises ClientError when it fails or runs longer than `timeout_s`."""
        self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        result = self._folder / "result.json"
        result.unlink(missing_ok=True)
        arguments = [
            *("--backend", "openai", "--base-url", base_url, "--endpoint", "/v1/completions"),
            *("--model", MODEL_NAME, "--tokenizer", str(self._tokenizer)),
            *workload.arguments(scale),
            *("--disable-tqdm", "--percentile-metrics", "ttft,tpot,itl"),
            *("--save-result", "--result-dir", str(self._folder), "--result-filename", result.name),
            "--save-detailed",
        ]
        load = OthersLoad()
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        self._await("ok", timeout_s)
        return _read(result, load.cores())

    def _await(self, wanted: str, timeout_s: float) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        answer = self._process.stdout.readline().strip() if ready else f"nothing within {timeout_s:.0f} s"
        if answer != wanted:
            self.stop()
            raise ClientError(f"the client answered {answer or 'nothing and ended'}: {last_words(self._log)}")


def _read(result: Path, others_cores: float) -> Measurement:
    try:
        found = json.loads(result.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ClientError("the client said that it was done and wrote no result") from error
    return Measurement(
        num_completed=found["completed"],
        num_failed=found["failed"],
        output_tokens_per_s=found["output_throughput"],
        mean_ttft_ms=found["mean_ttft_ms"],
        p99_ttft_ms=found["p99_ttft_ms"],
        mean_tpot_ms=found["mean_tpot_ms"],
        p99_itl_ms=found["p99_itl_ms"],
        seconds=found["duration"],
        others_cores=others_cores,
        errors=tuple(sorted({error.strip()[-300:] for error in found.get("errors", ()) if error})),
    )
