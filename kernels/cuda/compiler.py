"""From CUDA C++ to machine code of one architecture: nvcc, once for each source, compiler and architecture.

Knows files and a compiler; touches no device. What is compiled stays in the user's cache.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent
_TIMEOUT_S = 300


class CudaUnavailable(Exception):
    """Why kernels in CUDA C++ cannot be had here."""


def find_nvcc() -> Path | None:
    """nvcc on the PATH, or of CUDA_HOME."""
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    found = shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home) / "bin"))
    return None if found is None else Path(found)


def compile_cubin(name: str, capability: int, cache: Path | None = None) -> bytes:
    """The machine code of SOURCES/name for a compute capability such as 90; sm_90 with its own instructions, 90a.

    Raises CudaUnavailable without nvcc, or with what it says of the source.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise CudaUnavailable("nvcc is neither on the PATH nor in CUDA_HOME")
    arch = f"{capability}a" if capability >= 90 else str(capability)
    source = SOURCES / name
    identity = hashlib.sha256(source.read_bytes() + _version(nvcc).encode() + arch.encode()).hexdigest()[:32]
    folder = default_cache() if cache is None else cache
    built = folder / f"{source.stem}-sm_{arch}-{identity}.cubin"
    if not built.is_file():
        _compile(nvcc, source, arch, built)
    return built.read_bytes()


def default_cache() -> Path:
    """Where compiled code stays: below XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "octavo" / "cuda"


def _compile(nvcc: Path, source: Path, arch: str, built: Path) -> None:
    """Written beside and renamed: another process may compile the same."""
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as scratch:
        target = Path(scratch) / built.name
        generate = f"arch=compute_{arch},code=sm_{arch}"
        command = [str(nvcc), "-cubin", "-O3", "-std=c++17", f"-gencode={generate}", "-o", str(target), str(source)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if result.returncode:
            raise CudaUnavailable(f"{' '.join(command)} failed:\n{result.stderr[-4000:]}")
        target.rename(built)


@functools.cache
def _version(nvcc: Path) -> str:
    return subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
