"""Compiles through the very wrappers that serve, for GPUs that need not be there; tests read machine code."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed: nothing can be compiled")
from tools.dry_compile import missing_tools

MISSING = missing_tools()


@pytest.fixture(autouse=True)
def _needs_tools() -> None:
    if MISSING:
        pytest.skip(f"this Triton came without {', '.join(MISSING)}: no machine code to look at")
