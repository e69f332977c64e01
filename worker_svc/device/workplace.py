"""Everything that a rank finds out about where it computes, opened in the thread that will.

Knows devices, kernels and options; no model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.api import Backend
from kernels.select import open_backend
from octavo.machine import free_memory_bytes
from octavo.process import StartError
from worker_svc.config import WorkerConfig
from worker_svc.device.api import Device
from worker_svc.device.choice import choose_device, open_device
from worker_svc.device.memory import CudaMeter, Meter
from worker_svc.parallel.group import Membership

# One of so many parts of the free memory.
_SPARE_SHARE = 16


@dataclass(frozen=True)
class Workplace:
    """A rank's device and kernels. `meter` measures a card; None on the CPU, whose memory the system tells."""

    device: Device
    backend: Backend
    meter: Meter | None

    @property
    def torch_device(self) -> torch.device:
        return self.device.torch_device


OpenWorkplace = Callable[[WorkerConfig, Membership, int], Workplace]


def open_workplace(config: WorkerConfig, ranks: Membership, num_cpus: int) -> Workplace:
    """For a rank that may use so many CPUs of its machine. Raises StartError with the cause."""
    torch_device = choose_device(config.device, ranks.local_rank)
    if torch_device.type == "cuda" and config.kernels not in ("auto", "triton"):
        raise StartError(f"--kernels {config.kernels}: they compute on the CPU; give --device cpu, or leave them out")
    device = open_device(torch_device, config)
    meter = None if torch_device.type == "cpu" else CudaMeter(torch_device)
    try:
        num_threads, spare_bytes = config.num_threads or num_cpus, spare_memory_bytes(ranks.num_local_ranks)
        backend = open_backend(config.kernels, num_threads, torch_device, config.batch_invariant, spare_bytes)
    except (RuntimeError, ValueError) as error:
        raise StartError(f"--kernels {config.kernels}: {error}") from error
    return Workplace(device, backend, meter)


def spare_memory_bytes(num_local_ranks: int = 1) -> int:
    """What each of a machine's ranks may take of the main memory that is free now, for copies that only save time."""
    return free_memory_bytes() // (_SPARE_SHARE * num_local_ranks)
