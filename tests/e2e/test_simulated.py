"""`octavo serve --simulate`: a whole stack without a model, and operators' commands against it."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from octavo.options import DEFAULT_MODEL
from octavo.ports import free_port
from tests.e2e.stack import serving

pytestmark = pytest.mark.e2e


def octavo(*words: str) -> str:
    command = [sys.executable, "-m", "octavo", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_simulated_workers_serve_and_what_they_did_replays(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    costs = "step_ms=1,prefill_tokens_per_s=100000"
    options = ("--simulate", "--data-parallel-size", "2", "--simulated-costs", costs, "--scheduler-port", str(port))
    with serving(DEFAULT_MODEL, *options) as stack:
        body = json.dumps({"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}).encode()
        request = urllib.request.Request(
            f"{stack.http}/v1/completions", data=body, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            text = json.load(response)["choices"][0]["text"]
        assert text.startswith(" This text was made up by a simulated worker")
        address = ("--scheduler-address", f"127.0.0.1:{port}")
        assert "queue SmolLM2-135M-Instruct: 0 waiting" in octavo("top", *address, "--once", "--interval", "0.05")
        assert octavo("ctl", *address, "replicas").count(" serving ") >= 1
        dump = tmp_path / "dump"
        octavo("ctl", *address, "dump", str(dump))
        assert "every decision as recorded" in octavo("replay", str(dump))
