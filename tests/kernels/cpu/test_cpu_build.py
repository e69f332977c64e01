"""The extension's build and load: a failing compiler leaves an install that serves and says why; one OpenMP runtime."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import unavailable_reason
from kernels.cpu.extension import openmp_runtimes

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def failed_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project built with a compiler that always fails."""
    project = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "kernels", project / "kernels", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    compiler = project / "broken-compiler"
    compiler.write_text("#!/bin/sh\necho 'fatal error: no such instruction'\nexit 3\n")
    compiler.chmod(0o755)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(
        command, cwd=project, env={**os.environ, "CXX": str(compiler)}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return project


def test_a_failed_build_records_the_compilers_words(failed_build: Path) -> None:
    error = (failed_build / "kernels/cpu/build_error.txt").read_text()
    assert "fatal error: no such instruction" in error
    assert "exit status 3" in error
    assert not list((failed_build / "kernels/cpu").glob("*.so"))


def test_the_reference_serves_after_a_failed_build(failed_build: Path) -> None:
    script = (
        "from kernels.select import open_backend\n"
        "import kernels\n"
        "print(kernels.__path__[0], open_backend('auto', 1).info.name)\n"
        "open_backend('cpu', 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=failed_build, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(failed_build / "kernels"), "reference"], done.stderr
    assert done.stderr.count("fatal error: no such instruction") == 2  # the warning, then the refusal


@pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_holds_one_openmp_runtime() -> None:
    assert len(openmp_runtimes()) == 1
