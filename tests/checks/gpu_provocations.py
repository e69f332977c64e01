"""Facts that provoke each check of GPUs, and it alone."""

from __future__ import annotations

from dataclasses import replace

from octavo.checks.types import Facts, ModelFacts, Severity
from octavo.gpus import CardFacts, CardLink, GpuInventory
from octavo.machine import MachineFacts
from octavo.memory import KvPool, MemoryPrediction
from tests.fakes.fake_gpus import GIB, H100, SOFTWARE, USED, inventory

_MACHINE = MachineFacts("Linux", "x86_64", 8, 64 * GIB, 60 * GIB, frozenset({"avx2"}), (3, 12, 1), "/usr/bin/c++")
_MODEL = ModelFacts(
    name="m",
    directory="/models/m",
    missing=None,
    file_problems=(),
    dtype="bfloat16",
    model_limit_tokens=8192,
    max_model_len_tokens=8192,
    memory=MemoryPrediction(GIB, 2 * GIB, 100 * GIB, GIB // 4),
    kv_pool=KvPool(1, 16, 2**21, "what is left"),
)


def on_cards(
    found: GpuInventory,
    device: str = "auto",
    num_ranks: int = 1,
    utilization: float = 0.9,
    kv_cache_dtype: str = "auto",
) -> Facts:
    """A start of a small model on these GPUs. What the host has would not do for it on the CPU."""
    model = replace(_MODEL, num_ranks=num_ranks, num_local_ranks=num_ranks)
    cards = CardFacts(found, device, num_ranks, utilization, kv_cache_dtype)
    return Facts(_MACHINE, (), None, (), model, cards=cards)


GPU_PROVOKED: dict[str, tuple[Facts, Severity, str, str]] = {
    "gpu-visible": (
        on_cards(inventory(H100), num_ranks=2),
        Severity.FAILURE,
        "1 visible: NVIDIA H100",
        "Lower --tensor-parallel-size",
    ),
    "gpu-driver": (
        on_cards(inventory(H100, software=replace(SOFTWARE, driver_version="570.1", driver_cuda=(12, 8)))),
        Severity.FAILURE,
        "driver 570.1, which runs CUDA up to 12.8",
        "a torch built for CUDA 12",
    ),
    "gpu-architecture": (
        replace(
            on_cards(inventory(replace(H100, name="Tesla T4", architecture=75))),
            model=replace(_MODEL, dtype="float16"),
        ),
        Severity.FAILURE,
        "Tesla T4 (compute capability 7.5)",
        "CUDA_VISIBLE_DEVICES",
    ),
    "gpu-memory": (
        on_cards(inventory(replace(H100, free_bytes=GIB, users=(USED,)))),
        Severity.FAILURE,
        "weights and a step take 2.25 GiB of each card",
        "Free the card",
    ),
    "gpu-links": (
        on_cards(inventory(H100, H100, links=(CardLink(0, 1, "a PCIe host bridge", False),)), num_ranks=2),
        Severity.WARNING,
        "0-1 a PCIe host bridge without P2P",
        "nvidia-smi topo -m",
    ),
    "gpu-slices": (
        on_cards(inventory(replace(H100, is_divided=True))),
        Severity.FAILURE,
        "NVIDIA H100 GPU-1 is divided into MIG slices",
        "CUDA_VISIBLE_DEVICES to a slice's UUID",
    ),
}
