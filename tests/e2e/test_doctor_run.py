"""`octavo doctor --run` as a user types it, in an empty directory: nothing of the tests is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.commands.doctor_proofs import PROOFS
from octavo.ports import free_ports

pytestmark = pytest.mark.e2e


def test_the_installation_proves_itself(tmp_path: Path) -> None:
    http_port, grpc_port = map(str, free_ports(2))
    ports = ["--http-port", http_port, "--grpc-port", grpc_port]
    done = subprocess.run(
        [sys.executable, "-m", "octavo", "doctor", "--run", *ports],
        cwd=tmp_path,
        env={**os.environ, "OCTAVO_API_KEY": "not-for-the-proof", "OCTAVO_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()[-len(PROOFS) :]
    assert [line.split()[:2] for line in lines] == [["proved", proof.id] for proof in PROOFS]
    assert "were ready after" in lines[-1]
    assert "the same 24 tokens" in lines[-1]
