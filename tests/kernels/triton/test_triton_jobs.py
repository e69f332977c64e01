"""The Triton kernels without a GPU: run by the interpreter and compiled ahead of time, each in a process of its own.

By hand, with one test's name or none:

    KERNEL_JOB=interpreted TRITON_INTERPRET=1 python -m pytest tests/kernels/triton/interpreted
    KERNEL_JOB=compiled python -m pytest tests/kernels/triton/compiled
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

try:
    importlib.metadata.distribution("triton")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("Triton is not installed: its kernels are not tested", allow_module_level=True)

KERNEL_TESTS = Path(__file__).parent.parent
# Tests of every backend that cost the interpreter little.
SHARED_TESTS = ("test_kernel_blocks.py", "test_kernel_dense.py")


def run_job(job: str, marker: str, cache: Path, *tests: str) -> None:
    """Runs the tests of a folder, and others named from tests/kernels; fails with what they printed."""
    environment = {**os.environ, "KERNEL_JOB": job, "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    if job == "interpreted":
        environment["TRITON_INTERPRET"] = "1"
    paths = [str(KERNEL_TESTS / "triton" / job), *(str(KERNEL_TESTS / name) for name in tests)]
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", "-m", marker, *paths]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)
    assert result.returncode == 0, result.stdout[-20_000:] + result.stderr[-2_000:]
    summary = result.stdout.splitlines()[-1]
    assert re.search(r"\d+ passed", summary), result.stdout[-2_000:]
    if "skipped" in summary:
        pytest.skip(result.stdout[-1_000:])


@pytest.fixture
def cache(request: pytest.FixtureRequest) -> Path:
    """Compiled kernels stay from run to run, by the hash of all that they are made from."""
    assert request.config.cache is not None
    return Path(request.config.cache.mkdir("triton"))


def test_the_interpreter_agrees_with_the_oracles(cache: Path) -> None:
    run_job("interpreted", "not slow", cache, *SHARED_TESTS)


def test_the_compiled_kernels_are_what_was_designed(cache: Path) -> None:
    run_job("compiled", "not slow", cache)


@pytest.mark.slow
def test_the_interpreter_agrees_over_the_whole_matrix(cache: Path) -> None:
    shared = ("test_kernel_attention.py", "test_kernel_invariance.py", "test_kernel_sampling.py")
    run_job("interpreted", "slow or not slow", cache, *shared)


@pytest.mark.slow
def test_all_configurations_compile_as_designed(cache: Path) -> None:
    run_job("compiled", "slow", cache)
