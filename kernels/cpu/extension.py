"""Loads the compiled kernels and says why they cannot serve.

Knows the extension file, its build's error and the OpenMP runtime of this process; knows no kernels. torch is imported
first: the extension takes its OpenMP symbols from the library that torch has loaded, so that both share one pool of
threads.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import ModuleType

import torch

_BUILD_ERROR = Path(__file__).with_name("build_error.txt")
_OPENMP_NAMES = ("libgomp", "libomp", "libiomp")


@functools.cache
def _load() -> tuple[ModuleType | None, str | None]:
    """The extension, or the reason why there is none."""
    assert torch.__version__, "torch is loaded before the extension"
    try:
        from kernels.cpu import _native
    except ImportError as error:
        if _BUILD_ERROR.exists():
            return None, f"building them failed:\n{_BUILD_ERROR.read_text().strip()}"
        return None, f"the extension does not load: {error}"
    runtimes = openmp_runtimes()
    if len(runtimes) != 1:
        found = ", ".join(runtimes) or "none"
        return None, f"the process must hold exactly one OpenMP runtime and holds {found}"
    return _native, None


def unavailable_reason() -> str | None:
    """Why this backend cannot serve here; None when it can."""
    return _load()[1]


def native() -> ModuleType:
    """The extension. Raises RuntimeError with `unavailable_reason` when it cannot serve."""
    module, reason = _load()
    if module is None:
        raise RuntimeError(f"the cpu kernels cannot serve: {reason}")
    return module


def runnable_variants() -> list[str]:
    """Names of the built variants that this processor runs, best first."""
    return [name for name, runs in native().variants() if runs]


def variant_index(variant: str | None) -> int:
    """Place of a variant in the extension's table, None being the best. Raises ValueError when it does not run here."""
    runnable = runnable_variants()
    chosen = runnable[0] if variant is None else variant
    if chosen not in runnable:
        raise ValueError(f"variant {variant!r} does not run on this processor, which runs {', '.join(runnable)}")
    return [name for name, _ in native().variants()].index(chosen)


def openmp_runtimes() -> list[str]:
    """Files of the OpenMP runtimes mapped into this process; empty where the system does not tell."""
    if not sys.platform.startswith("linux"):
        return []
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    return sorted(file for file in files if Path(file).name.startswith(_OPENMP_NAMES))
