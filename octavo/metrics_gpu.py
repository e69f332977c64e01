"""Memory, utilisation and temperature of NVIDIA GPUs, read through NVML when somebody scrapes.

NVML comes with the driver, its Python binding with the extra `nvml`; without either there is nothing to show, and the
log says so at level debug. Must not know what runs on the GPUs.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.gpus import nvml_text, visible_handles
from octavo.metrics import MetricSet, gauge

_LOG = logging.getLogger(__name__)

MEMORY_USED = gauge("octavo_gpu_memory_used_bytes", "Memory in use on the GPU, by whomever.", "gpu", "name")
MEMORY_TOTAL = gauge("octavo_gpu_memory_total_bytes", "Memory of the GPU.", "gpu", "name")
UTILISATION = gauge(
    "octavo_gpu_utilization_ratio", "Share of the last sampling period in which a kernel ran.", "gpu", "name"
)
TEMPERATURE = gauge("octavo_gpu_temperature_celsius", "Temperature of the GPU's core.", "gpu", "name")
POWER = gauge("octavo_gpu_power_watts", "Power that the GPU draws.", "gpu", "name")

CATALOGUE = (MEMORY_USED, MEMORY_TOTAL, UTILISATION, TEMPERATURE, POWER)

_TEMPERATURE_OF_CORE = 0  # NVML_TEMPERATURE_GPU


@dataclass(frozen=True)
class _Gpu:
    """One GPU that this process may use."""

    labels: tuple[str, str]
    handle: Any


class Gpus:
    """The GPUs that this process sees, by CUDA_VISIBLE_DEVICES; none where NVML is not there."""

    def __init__(self, nvml: Any, visible: str | None) -> None:
        """`nvml` is the module pynvml, initialised, or one like it; `visible` is the variable's value."""
        self._nvml = nvml
        self._gpus = [
            _Gpu((str(nvml.nvmlDeviceGetIndex(handle)), nvml_text(nvml.nvmlDeviceGetName(handle))), handle)
            for handle in visible_handles(nvml, visible)
        ]

    def read_into(self, metrics: MetricSet) -> None:
        """Replace what is shown by what is so now. A reading that a GPU does not offer is left out."""
        nvml = self._nvml
        memories = self._read(nvml.nvmlDeviceGetMemoryInfo)
        metrics.replace(MEMORY_USED, {labels: memory.used for labels, memory in memories.items()})
        metrics.replace(MEMORY_TOTAL, {labels: memory.total for labels, memory in memories.items()})
        rates = self._read(nvml.nvmlDeviceGetUtilizationRates)
        metrics.replace(UTILISATION, {labels: rate.gpu / 100 for labels, rate in rates.items()})
        metrics.replace(
            TEMPERATURE, self._read(lambda handle: nvml.nvmlDeviceGetTemperature(handle, _TEMPERATURE_OF_CORE))
        )
        watts = {labels: milliwatts / 1000 for labels, milliwatts in self._read(nvml.nvmlDeviceGetPowerUsage).items()}
        metrics.replace(POWER, watts)

    def _read(self, ask: Any) -> Mapping[tuple[str, ...], Any]:
        found: dict[tuple[str, ...], Any] = {}
        for gpu in self._gpus:
            try:
                found[gpu.labels] = ask(gpu.handle)
            except self._nvml.NVMLError as error:
                _LOG.debug("GPU %s: %s", gpu.labels[0], error)
        return found


def find_gpus() -> Gpus | None:
    """The GPUs of this machine; None, with the reason in the log, where NVML cannot be asked."""
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        _LOG.debug("no GPU metrics: nvidia-ml-py is not installed; pip install 'octavo[nvml]' brings it")
        return None
    try:
        nvml.nvmlInit()
        return Gpus(nvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
    except nvml.NVMLError as error:
        _LOG.debug("no GPU metrics: %s", error)
        return None
