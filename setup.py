"""Builds the C++ kernels; everything else about the package is in pyproject.toml.

The same sources are compiled once per instruction set, side by side, into one extension without -march=native, so a
wheel runs on every processor of its architecture. The extension is optional: when it cannot be built, the compiler's
words go into kernels/cpu/build_error.txt, the install succeeds, and the worker says so when it starts.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("kernels/cpu/src")
ERROR_FILE = Path("kernels/cpu/build_error.txt")

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_X86_VARIANTS = {"avx512_bf16": (*_AVX512, "-mavx512bf16"), "avx512": _AVX512, "avx2": _AVX2}
# Best first: the order in which a worker looks for one that its processor runs.
VARIANTS: dict[str, tuple[str, ...]] = {
    **(_X86_VARIANTS if platform.machine() in ("x86_64", "AMD64") else {}),
    "portable": (),
}
# No contraction: which products and sums are fused is part of the numerics and written out.
_FLAGS = (
    *("-std=c++17", "-O2", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-w"),
)


class BuildFailure(Exception):
    """A compiler command that failed, with its output."""


class BuildKernels(build_ext):
    """Compiles the variants in parallel and records a failure instead of raising it."""

    def run(self) -> None:
        super().run()
        for root in (Path(self.build_lib), *((Path(),) if self.inplace else ())):
            self._record(root / ERROR_FILE)

    def build_extension(self, ext: Extension) -> None:
        self.failure = ""
        target = Path(self.get_ext_fullpath(ext.name)).absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._build(target)
        except (OSError, BuildFailure) as error:
            self.failure = f"{error}\n"
            target.unlink(missing_ok=True)
            print(f"warning: the C++ kernels were not built:\n{error}")

    def _build(self, target: Path) -> None:
        objects = Path(self.build_temp).absolute() / "kernels"
        objects.mkdir(parents=True, exist_ok=True)
        compiler = _compiler()
        listed = "-DVARIANTS(X)=" + " ".join(f"X({name})" for name in VARIANTS)
        include = "-I" + sysconfig.get_paths()["include"]
        module = [*compiler, *_FLAGS, listed, include, "-c", f"{SOURCES}/module.cpp", "-o", f"{objects}/module.o"]
        commands = [module]
        for name, flags in VARIANTS.items():
            source = ["-c", f"{SOURCES}/variant.cpp", "-o", f"{objects}/{name}.o"]
            commands.append([*compiler, *_FLAGS, *flags, f"-DVARIANT={name}", *source])
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        for name in VARIANTS:
            _check_symbols(objects / f"{name}.o")
        # Without -fopenmp: the OpenMP runtime is the one torch brings, whatever its file is called.
        _run([*compiler, "-shared", *(command[-1] for command in commands), "-o", str(target)])

    def _record(self, path: Path) -> None:
        failure = getattr(self, "failure", "")
        if failure and path.parent.is_dir():
            path.write_text(failure)
        elif not failure:
            path.unlink(missing_ok=True)


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise BuildFailure(f"{shlex.join(command)}\nexit status {done.returncode}\n{done.stdout}")


def _check_symbols(variant: Path) -> None:
    """A variant may define its table alone: of a weak symbol, such as a standard library template's, the linker keeps
    one copy for all, perhaps the one with instructions that this processor lacks."""
    if shutil.which("nm") is None:
        return
    listing = subprocess.run(["nm", "--defined-only", "--extern-only", str(variant)], capture_output=True, text=True)
    symbols = [line.split()[-1] for line in listing.stdout.splitlines()]
    if listing.returncode == 0 and len(symbols) != 1:
        raise BuildFailure(f"{variant.name} defines {', '.join(symbols)}; only its table may be visible")


setup(
    ext_modules=[Extension("kernels.cpu._native", [], optional=True)],
    cmdclass={"build_ext": BuildKernels},
)
