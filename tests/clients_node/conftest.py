"""Node packages for the tests here, installed beside their package.json when its lock has changed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.router_stack import write_text_model

Install = Callable[[Path], None]

INSTALL_LIMIT_S = 300
OLDEST_NODE = 20


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.node)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def node_environment() -> dict[str, str]:
    """An environment with node, npm and the buf of this virtual environment."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("NO CLIENT OF ANOTHER LANGUAGE IS TESTED: node or npm is missing (apt install nodejs npm)")
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.lstrip("v").partition(".")[0]) < OLDEST_NODE:
        pytest.skip(f"NO CLIENT OF ANOTHER LANGUAGE IS TESTED: node is {version}, and {OLDEST_NODE} is needed")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "npm_config_update_notifier": "false"}


@pytest.fixture(scope="session")
def install(node_environment: dict[str, str]) -> Install:
    """`npm ci` in a directory, unless what is there was installed from the same lock."""

    def run(directory: Path) -> None:
        lock = hashlib.sha256((directory / "package-lock.json").read_bytes()).hexdigest()
        stamp = directory / "node_modules" / ".octavo-lock"
        if stamp.is_file() and stamp.read_text() == lock:
            return
        command = ["npm", "ci", "--no-audit", "--no-fund", "--prefer-offline"]
        try:
            done = subprocess.run(
                command, cwd=directory, env=node_environment, capture_output=True, text=True, timeout=INSTALL_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"NO CLIENT OF ANOTHER LANGUAGE IS TESTED: npm took over {INSTALL_LIMIT_S} s")
        if done.returncode != 0 and any(
            word in done.stderr for word in ("ENOTFOUND", "EAI_AGAIN", "ECONN", "ETIMEDOUT")
        ):
            pytest.skip(
                f"NO CLIENT OF ANOTHER LANGUAGE IS TESTED: npm's registry does not answer: {done.stderr[-300:]}"
            )
        assert done.returncode == 0, done.stderr
        stamp.write_text(lock)

    return run
