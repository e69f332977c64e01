"""NVRTC, the compiler of CUDA C++ that torch's CUDA builds bring along: from a source to machine code, in this process.

Knows a library and its calls; touches no device and no files but the library's own.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

# From the newest on: what a loader finds by itself, and where NVIDIA's packages put it.
_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
_FOLDERS = ("cu13/lib", "cuda_nvrtc/lib")


class NvrtcError(Exception):
    """What NVRTC says of a source, or why it cannot be asked."""


class Nvrtc:
    """One library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.nvrtcGetErrorString.restype = ctypes.c_char_p

    @property
    def version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return f"{major.value}.{minor.value}"

    def compile(self, source: Path, arch: str) -> bytes:
        """A cubin for an architecture such as "90a". Raises NvrtcError with the compiler's log."""
        program = ctypes.c_void_p()
        text, name = source.read_bytes(), source.name.encode()
        self._check(self._library.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None))
        try:
            options = (ctypes.c_char_p * 2)(f"--gpu-architecture=sm_{arch}".encode(), b"--std=c++17")
            if self._library.nvrtcCompileProgram(program, len(options), options):
                raise NvrtcError(f"{source.name}: {self._taken('ProgramLog', program).decode()[-4000:]}")
            return self._taken("CUBIN", program)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _taken(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _check(self, status: int) -> None:
        if status:
            raise NvrtcError(f"NVRTC: {self._library.nvrtcGetErrorString(status).decode()}")


@functools.cache
def find_nvrtc() -> Nvrtc | None:
    """The library where there is one."""
    for candidate in (*_NAMES, *map(str, _packaged())):
        try:
            return Nvrtc(ctypes.CDLL(candidate))
        except OSError:
            continue
    return None


def _packaged() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        for folder in _FOLDERS:
            yield from (Path(root) / folder / name for name in _NAMES)
