"""Which device a rank computes on: what --device says, for the rank's place on its machine.

A GPU that should be there and is not is an error: the CPU takes over only where it was asked for, or where nothing says
that this machine has a GPU.
"""

from __future__ import annotations

import os

import torch

from octavo.gpus import collect_gpus
from octavo.process import StartError
from worker_svc.config import WorkerConfig
from worker_svc.device.api import Device
from worker_svc.device.cpu import CPU


def choose_device(wanted: str, local_rank: int, num_visible: int | None = None) -> torch.device:
    """The rank's device. `num_visible` are the CUDA devices that torch sees, asked for when not given.

    Raises StartError where there are fewer than it takes.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    if num_visible is None:
        num_visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto" and num_visible == 0 and not collect_gpus().has_signs:
        return torch.device("cpu")
    first = int(wanted.partition(":")[2] or 0)
    index = first + local_rank
    if index >= num_visible:
        which = f"rank {local_rank} of this machine needs CUDA device {index}"
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        visible = str(num_visible) if shown is None else f"{num_visible} (CUDA_VISIBLE_DEVICES={shown})"
        raise StartError(
            f"--device {wanted}: {which}, torch {torch.__version__} sees {visible}. `octavo doctor` says why; "
            "lower --tensor-parallel-size, show more devices (CUDA_VISIBLE_DEVICES), or give --device cpu"
        )
    return torch.device("cuda", index)


def open_device(torch_device: torch.device, config: WorkerConfig) -> Device:
    """The device, ready to be launched on by the thread that calls."""
    if torch_device.type == "cpu":
        return CPU
    from worker_svc.device.cuda import CudaDevice

    return CudaDevice(torch_device, config.nvtx)
