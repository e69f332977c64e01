"""From CUDA C++ to machine code of one architecture, once for each source, compiler and architecture.

The compiler is nvcc where it is installed, else NVRTC, which torch's CUDA builds bring along. Knows files and
compilers; touches no device. What is compiled stays in the user's cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kernels.cuda.nvrtc import NvrtcError, find_nvrtc

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

    Raises CudaUnavailable without a compiler, or with what it says of the source.
    """
    nvcc = find_nvcc()
    compiler = find_nvrtc() if nvcc is None else Nvcc(nvcc)
    if compiler is None:
        raise CudaUnavailable("nvcc is neither on the PATH nor in CUDA_HOME, and libnvrtc is not found")
    arch = f"{capability}a" if capability >= 90 else str(capability)
    source = SOURCES / name
    folder = default_cache() if cache is None else cache
    try:
        identity = hashlib.sha256(source.read_bytes() + compiler.version.encode() + arch.encode()).hexdigest()[:32]
        built = folder / f"{source.stem}-sm_{arch}-{identity}.cubin"
        if not built.is_file():
            _keep(compiler.compile(source, arch), built)
    except NvrtcError as error:
        raise CudaUnavailable(str(error)) from error
    return built.read_bytes()


def default_cache() -> Path:
    """Where compiled code stays: below XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "octavo" / "cuda"


def _keep(cubin: bytes, built: Path) -> None:
    """Written beside and renamed: another process may compile the same."""
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as scratch:
        target = Path(scratch) / built.name
        target.write_bytes(cubin)
        target.rename(built)


@dataclass(frozen=True)
class Nvcc:
    """The compiler of the CUDA toolkit."""

    path: Path

    @property
    def version(self) -> str:
        return self._run("--version")

    def compile(self, source: Path, arch: str) -> bytes:
        """A cubin for an architecture such as "90a". Raises CudaUnavailable with the compiler's errors."""
        with tempfile.TemporaryDirectory() as scratch:
            target = Path(scratch) / "built.cubin"
            generate = f"arch=compute_{arch},code=sm_{arch}"
            options = ["-cubin", "-O3", "-std=c++17", f"-gencode={generate}", "-o", str(target)]
            self._run(*options, str(source))
            return target.read_bytes()

    def _run(self, *arguments: str) -> str:
        command = [str(self.path), *arguments]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise CudaUnavailable(f"{' '.join(command)} took more than {_TIMEOUT_S} s") from error
        if result.returncode:
            raise CudaUnavailable(f"{' '.join(command)} failed:\n{result.stderr[-4000:]}")
        return result.stdout
