"""What an import may bring with it, measured in fresh interpreters: the import rules as a user feels them."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "numpy"}


def modules_after(statement: str) -> set[str]:
    """Top-level names in sys.modules of a fresh interpreter that has run `statement`."""
    code = f"{statement}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "octavo",
        "octavo.cli",
        "octavo.client",
        "octavo.process",
        "octavo.sources",
        "octavo.stack.serve",
        "octavo.checks",
        "octavo.commands.bench",
        "octavo.commands.doctor",
        "router",
        "router.server",
        "router.grpc_api",
        "router.openai.app",
        "router.config",
        "scheduler_svc",
        "scheduler_svc.server",
        "scheduler_svc.config",
        "worker_svc",
        "worker_svc.config",
        "worker_svc.server",
    ],
)
def test_a_light_module_brings_nothing_heavy(module: str) -> None:
    assert not modules_after(f"import {module}") & HEAVY


def test_the_core_brings_only_pure_standard_library() -> None:
    before = modules_after("pass")
    brought = modules_after("import scheduler_svc.core.scheduler") - before
    assert not brought & {"grpc", "google", "asyncio", "random", "socket", "threading", "logging", "octavo"}


def test_the_services_do_not_bring_each_other() -> None:
    assert not modules_after("import router.server") & {"scheduler_svc", "worker_svc", "kernels"}
    assert not modules_after("import scheduler_svc.server") & {"router", "worker_svc", "kernels"}
    assert not modules_after("import worker_svc.server") & {"router", "scheduler_svc"}


def test_a_start_brings_only_what_every_start_needs() -> None:
    # Connect and gRPC-Web come with their first request, protobuf and the checks beside the children's own start.
    assert "connectrpc" not in modules_after("import router.server")
    assert not modules_after("import octavo.stack.serve") & {"grpc", "google"}
    own = "import sys; print(*sorted(sys.modules))"
    command = f"from octavo.commands.command_line import parse; parse('worker', '', []); {own}"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    others = {"router.config", "scheduler_svc.config", "octavo.bench.options", "octavo.commands.planning"}
    assert not set(done.stdout.split()) & others
