"""Chooses a kernel backend by name or device. Imports only the one it opens, and says why another could not serve."""

from __future__ import annotations

import importlib.util
import logging

import torch

from kernels.api import Backend

BACKEND_CHOICES = ("auto", "reference", "cpu", "triton")

_log = logging.getLogger(__name__)


def open_backend(
    name: str,
    num_threads: int | None,
    device: torch.device | None = None,
    batch_invariant: bool = False,
    spare_bytes: int | None = None,
) -> Backend:
    """The backend of that name with its thread count set (None: left as it is).

    "auto" is the Triton kernels for a CUDA `device`; for the CPU, which None means, it is the C++ kernels where they
    were built and load, else the reference, with a warning that gives the reason. `batch_invariant` is for the Triton
    kernels: the others always try to be. `spare_bytes` of main memory may hold second copies of weights that make steps
    of few rows faster (None: a little). Raises RuntimeError with the reason when "cpu" or "triton" is wanted and
    cannot serve, ValueError for an unknown name.
    """
    if name not in BACKEND_CHOICES:
        raise ValueError(f"kernels {name!r} is not one of {', '.join(BACKEND_CHOICES)}")
    if name == "triton" or (name == "auto" and device is not None and device.type == "cuda"):
        return _open_triton(num_threads, device, batch_invariant)
    if name == "reference":
        return _open_reference(num_threads)
    reason = _cpu_unavailable_reason()
    if reason is None:
        return _open_cpu(num_threads, spare_bytes)
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


def _open_cpu(num_threads: int | None, spare_bytes: int | None) -> Backend:
    from kernels.cpu import CpuBackend

    return CpuBackend(num_threads) if spare_bytes is None else CpuBackend(num_threads, max_coded_bytes=spare_bytes)


def _open_triton(num_threads: int | None, device: torch.device | None, batch_invariant: bool) -> Backend:
    if device is None:
        device = torch.device("cuda")
    if device.type != "cuda":
        raise RuntimeError(f"the triton kernels cannot serve: they run on CUDA devices, not on {device}")
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError("the triton kernels cannot serve: Triton is not installed; pip install 'octavo[gpu]'")
    if not torch.cuda.is_available():
        raise RuntimeError(f"the triton kernels cannot serve: torch {torch.__version__} sees no CUDA device")
    from kernels.triton import TritonBackend

    backend = TritonBackend(device, batch_invariant)
    if num_threads is not None:
        backend.set_num_threads(num_threads)
    return backend


def _open_reference(num_threads: int | None) -> Backend:
    from kernels.reference import ReferenceBackend

    return ReferenceBackend(num_threads)
