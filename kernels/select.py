"""Chooses a kernel backend by name. Imports only the one it opens, and says why another one could not serve."""

from __future__ import annotations

import logging

from kernels.api import Backend

BACKEND_CHOICES = ("auto", "reference", "cpu")

_log = logging.getLogger(__name__)


def open_backend(name: str, num_threads: int | None) -> Backend:
    """The backend of that name with its thread count set (None: left as it is).

    "auto" is the C++ kernels where they were built and load, else the reference, with a warning that gives the reason.
    Raises RuntimeError with that reason when "cpu" is asked for and cannot serve, ValueError for an unknown name.
    """
    if name not in BACKEND_CHOICES:
        raise ValueError(f"kernels {name!r} is not one of {', '.join(BACKEND_CHOICES)}")
    if name == "reference":
        return _open_reference(num_threads)
    reason = _cpu_unavailable_reason()
    if reason is None:
        return _open_cpu(num_threads)
    if name == "cpu":
        raise RuntimeError(f"the cpu kernels cannot serve: {reason}")
    _log.warning("serving with the slow reference kernels, the cpu kernels cannot serve: %s", reason)
    return _open_reference(num_threads)


def _cpu_unavailable_reason() -> str | None:
    """Why the C++ kernels cannot serve, the compiler's error where building failed; None when they can."""
    try:
        from kernels.cpu import unavailable_reason
    except ImportError as error:
        return f"kernels.cpu does not import: {error}"
    return unavailable_reason()


def _open_cpu(num_threads: int | None) -> Backend:
    from kernels.cpu import CpuBackend

    return CpuBackend(num_threads)


def _open_reference(num_threads: int | None) -> Backend:
    from kernels.reference import ReferenceBackend

    return ReferenceBackend(num_threads)
