"""Checks of what is installed: Python, packages, compiler, C++ kernels. Pure functions over facts."""

from __future__ import annotations

import re

from octavo.checks.types import Check, Facts, Finding, PackageFacts, Severity

_OLDEST_PYTHON = (3, 11)
_INSTALL_COMPILER = "Install a C++ compiler (Debian: apt install g++; macOS: xcode-select --install)"


def python_version(facts: Facts) -> Finding:
    running = ".".join(map(str, facts.machine.python_version))
    oldest = ".".join(map(str, _OLDEST_PYTHON))
    ok = facts.machine.python_version[:2] >= _OLDEST_PYTHON
    return Finding(
        "python-version",
        Severity.OK if ok else Severity.FAILURE,
        f"Python {running}",
        f"at least {oldest}",
        "" if ok else f"Make the environment anew with Python {oldest} or later",
    )


def package_versions(facts: Facts) -> Finding | None:
    if not facts.packages:
        return None
    outside = [package for package in facts.packages if not in_range(package.version, package.tested_range)]
    if not outside:
        return Finding("package-versions", Severity.OK, f"{len(facts.packages)} packages", "the tested ranges")
    install = " ".join(f"'{package.name}{package.tested_range}'" for package in outside)
    return Finding(
        "package-versions",
        Severity.WARNING,
        ", ".join(f"{package.name} {package.version}" for package in outside),
        "tested with " + ", ".join(_requirement(package) for package in outside),
        f"If something fails, run: pip install {install}",
    )


def cpu_kernels(facts: Facts) -> Finding | None:
    if facts.kernels is None:
        return None
    if facts.kernels.built:
        return Finding("cpu-kernels", Severity.OK, "built", "built, or the reference kernels serve")
    reason = facts.kernels.build_error
    compiler = facts.machine.compiler
    if compiler is None:
        remedy = f"{_INSTALL_COMPILER}, then install octavo again"
    else:
        remedy = f"Mend what the build complained of and install octavo again; the compiler is {compiler}"
    return Finding(
        "cpu-kernels",
        Severity.WARNING,
        f"not built: {_last_line(reason)}" if reason else "not built",
        "built, or the slower reference kernels serve",
        remedy,
    )


def compiler_present(facts: Facts) -> Finding | None:
    """Only of interest while the kernels are missing: built ones need no compiler."""
    if facts.kernels is None or facts.kernels.built:
        return None
    found = facts.machine.compiler
    return Finding(
        "compiler",
        Severity.OK if found else Severity.WARNING,
        found or "no c++, g++ or clang++ on the PATH",
        "one C++ compiler, to build the fast kernels",
        "" if found else _INSTALL_COMPILER,
    )


def in_range(version: str, tested_range: str) -> bool:
    """Whether a release version lies in a range of `>=`, `<`, `==`, `!=`, `>` and `<=` bounds, all of which hold.

    Suffixes such as `rc1` or `+cpu` are not compared. Raises ValueError for another operator.
    """
    have = _release(version)
    for bound in filter(None, (part.strip() for part in tested_range.split(","))):
        match = re.fullmatch(r"(>=|<=|==|!=|<|>)\s*([\w.+!-]+)", bound)
        if match is None:
            raise ValueError(f"{bound!r} in the range {tested_range!r} is not a bound such as >=1.80")
        want = _release(match[2])
        width = max(len(have), len(want))
        left, right = (numbers + (0,) * (width - len(numbers)) for numbers in (have, want))
        holds = {
            ">=": left >= right,
            "<=": left <= right,
            "==": left == right,
            "!=": left != right,
            "<": left < right,
            ">": left > right,
        }
        if not holds[match[1]]:
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _requirement(package: PackageFacts) -> str:
    return f"{package.name}{package.tested_range}"


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1].strip()


CHECKS = (
    Check(
        "python-version",
        "Python is new enough",
        "Make the environment anew with a Python that is new enough: `python3.12 -m venv .venv`.",
        python_version,
    ),
    Check(
        "package-versions",
        "Installed packages lie in the ranges this release was tested with",
        "Only a warning: newer packages usually work. If something fails, install the tested range that the "
        "finding names, or install octavo into an environment of its own.",
        package_versions,
    ),
    Check(
        "cpu-kernels",
        "The C++ kernels are built",
        "Without them the reference kernels serve: the same answers, slower. Install a C++ compiler, then "
        "install octavo again (`pip install --force-reinstall --no-deps octavo`, in a clone with `-e .` for its "
        "name), and read the reason that the finding quotes from the build.",
        cpu_kernels,
        processes=("worker",),
    ),
    Check(
        "compiler",
        "A C++ compiler is there to build the kernels",
        "Debian and Ubuntu: `apt install g++`. Fedora: `dnf install gcc-c++`. macOS: `xcode-select --install`.",
        compiler_present,
        processes=("worker",),
    ),
)
