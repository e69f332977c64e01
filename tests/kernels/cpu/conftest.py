"""Tests of the C++ kernels run over every instruction set that this machine runs; all are skipped without the build."""

from __future__ import annotations

import pytest

from kernels.cpu import CpuBackend, unavailable_reason
from kernels.cpu.extension import runnable_variants

VARIANTS = [] if unavailable_reason() else runnable_variants()


@pytest.fixture(params=VARIANTS or ["none"])
def variant(request: pytest.FixtureRequest) -> str:
    """The name of an instruction set's kernels."""
    if request.param == "none":
        pytest.skip(f"{unavailable_reason()}")
    return str(request.param)


@pytest.fixture
def backend(variant: str) -> CpuBackend:
    """One variant's kernels with one thread."""
    return CpuBackend(1, variant)
