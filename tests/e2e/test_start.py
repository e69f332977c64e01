"""How a stack starts, idles, and says why it can't."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from octavo.ports import free_port, free_ports
from octavo.sources import resolve
from tests.e2e.stack import Stack, children_of, cpu_seconds, eventually, starting


def test_the_idle_stack_uses_under_2_percent_of_a_core(stack: Stack) -> None:
    pids = [stack.process.pid, *children_of(stack.process.pid)]

    def used() -> float:
        return sum(cpu_seconds(pid) for pid in pids)

    before, start = used(), time.monotonic()
    threading.Event().wait(3)  # measuring idleness takes idle time
    share = (used() - before) / (time.monotonic() - start)
    assert share < 0.02, f"{share:.1%} of one core"


def test_the_scheduler_is_ready_in_a_second() -> None:
    port = free_port("127.0.0.1")
    command = [sys.executable, "-m", "octavo", "scheduler", "--port", str(port)]
    start = time.monotonic()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "ready on" in line:
                break
        seconds = time.monotonic() - start
    finally:
        process.terminate()
        process.wait(10)
    # The target is one second on a quiet machine; the tests may share theirs.
    assert seconds < 3


def test_the_503_body_names_the_phase_of_the_start() -> None:
    with starting("default", "--num-kv-blocks", "64") as stack:
        names = set()

        def saw_ready() -> bool:
            status, body = stack.ready()
            assert status in (0, 200, 503)
            names.update(phase["name"] for phase in body.get("phases", []))
            return status == 200

        eventually(saw_ready, 120, "ready")
        assert names & {"import", "model", "weights", "kv", "warm-up"}, names


def failed_start(*options: str, model: str = "default") -> tuple[int, str]:
    ports = ("--http-port", "0", "--grpc-port", "0")  # the last word for an option counts
    command = [sys.executable, "-m", "octavo", "serve", model, *ports, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, (done.stdout + done.stderr).strip().splitlines()[-1]


def test_a_taken_port_is_named_before_anything_loads() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        status, last = failed_start("--http-port", port, "--grpc-port", str(free_port("127.0.0.1")))
    assert status != 0
    assert port in last


def test_a_path_that_does_not_exist_is_named() -> None:
    status, last = failed_start(model="./no/such/model")
    assert status != 0
    assert "no/such/model" in last


def test_f50_a_missing_tensor_is_the_last_line(tmp_path: Path) -> None:
    source = resolve("default")
    model = tmp_path / "model"
    shutil.copytree(source.directory, model)
    config = json.loads((model / "config.json").read_text())
    import numpy as np
    from safetensors.numpy import save_file

    hidden = config["hidden_size"]
    save_file(
        {"model.embed_tokens.weight": np.zeros((config["vocab_size"], hidden), np.float16)}, model / "model.safetensors"
    )
    http_port, grpc_port = map(str, free_ports(2))
    status, last = failed_start("--http-port", http_port, "--grpc-port", grpc_port, model=os.fspath(model))
    assert status != 0
    assert "model.norm.weight" in last or "layers.0" in last, last
