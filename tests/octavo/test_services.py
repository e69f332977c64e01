"""Becoming a service: whatever ends the start is said in the last line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from octavo.commands.services import SERVICES, say_cause
from octavo.options import OptionError
from octavo.process import StartError
from router.config import RouterConfig


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (StartError("the disk\n  is full"), "octavo worker: the disk is full"),
        (OptionError("--seed", "x", "must be a number", "Use 0"), "octavo worker: --seed x: must be a number. Use 0"),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            "octavo worker: torch is not installed. Run: pip install 'octavo[worker]'",
        ),
        (
            ModuleNotFoundError("No module named 'worker_svc.x'", name="worker_svc.x"),
            "octavo worker: ModuleNotFoundError: No module named 'worker_svc.x'",
        ),
        (KeyError("blocks"), "octavo worker: KeyError: 'blocks'"),
    ],
)
def test_the_cause_is_one_line(error: Exception, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert say_cause("octavo worker", "worker", error) == 1
    assert capsys.readouterr().err.splitlines() == [line]


def test_an_unexpected_error_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    say_cause("octavo worker", "worker", StartError("expected"))
    assert caplog.records == []
    say_cause("octavo worker", "worker", ValueError("unexpected"))
    assert caplog.records[0].exc_info is not None


def test_an_error_of_the_models_files_is_expected(caplog: pytest.LogCaptureFixture) -> None:
    from octavo.sources import SourceError

    say_cause("octavo worker", "worker", SourceError("weights.gguf: truncated"))
    assert caplog.records == []


def test_a_worker_without_its_model_ends_before_it_loads_anything(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    command = [sys.executable, "-m", "octavo", "worker", absent, "--max-num-seqs", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[-1].startswith("octavo worker: model-found: ")
    assert absent in lines[-1]
    assert any(line.endswith("option --max-num-seqs 3 (default 64)") for line in lines)


def test_every_service_is_a_command_with_a_config() -> None:
    assert set(SERVICES) == {"router", "scheduler", "worker"}
    for service in SERVICES.values():
        assert service.module == f"{service.config_class.__module__.split('.')[0]}.server"


def test_a_router_cannot_listen_twice_on_one_port() -> None:
    with pytest.raises(OptionError, match="--grpc-port 8000: is --http-port too"):
        RouterConfig(grpc_port=8000)
    RouterConfig(http_port=0, grpc_port=0)
