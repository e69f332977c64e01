"""Checks of GPUs: that those asked for can be used, and hold what they are to hold. Pure functions over facts.

They judge nothing where the start means to compute on the CPU.
"""

from __future__ import annotations

from octavo.checks.types import Check, Facts, Finding, Severity
from octavo.gpus import Card, CardFacts, GpuInventory
from octavo.sizes import format_bytes

_ON_CPU = "or give --device cpu"
_OLDEST_ARCHITECTURE = 80
_OLDEST_FP8_ARCHITECTURE = 89


def gpu_visible(facts: Facts) -> Finding | None:
    cards = _asked(facts)
    if cards is None:
        return None
    inventory, wanted = cards.inventory, cards.first + cards.num_devices
    limit = f"{cards.num_devices} for the ranks of the workers on this machine (--device {cards.device})"
    blocked = _why_none(inventory)
    if blocked is not None:
        return Finding("gpu-visible", Severity.FAILURE, blocked[0], limit, f"{blocked[1]}, {_ON_CPU}")
    if not inventory.cards:
        measured = f"NVML says nothing: {inventory.nvml_problem}"
        remedy = "GPUs cannot be checked before the start. Install nvidia-ml-py: pip install 'octavo[nvml]'"
        return Finding("gpu-visible", Severity.WARNING, measured, limit, remedy)
    measured = f"{len(inventory.cards)} visible: {', '.join(map(_free, inventory.cards))}"
    if len(inventory.cards) >= wanted:
        return Finding("gpu-visible", Severity.OK, measured, limit)
    if inventory.visible_devices is not None:
        measured += f" (CUDA_VISIBLE_DEVICES={inventory.visible_devices})"
    remedy = f"Lower --tensor-parallel-size or --data-parallel-size, show more cards, {_ON_CPU}"
    return Finding("gpu-visible", Severity.FAILURE, measured, limit, remedy)


def _free(card: Card) -> str:
    return f"{card.name}, {format_bytes(card.free_bytes)} of {format_bytes(card.total_bytes)} free{_held_by(card)}"


def _why_none(inventory: GpuInventory) -> tuple[str, str] | None:
    """Why no GPU can be used, and what to do; None where nothing stands in the way."""
    software = inventory.software
    if software.torch_version is not None and software.torch_cuda is None:
        return (
            f"torch {software.torch_version} is a CPU build",
            "Install one for CUDA: pip install torch from its CUDA index",
        )
    if inventory.cards:
        return None
    if inventory.visible_devices is not None and not inventory.nvml_problem:
        shown = f"CUDA_VISIBLE_DEVICES is {inventory.visible_devices!r}, which names no card"
        return shown, "Unset it, or name cards by number or UUID"
    if not inventory.has_device_files and inventory.in_container:
        remedy = (
            "Start the container with GPUs: docker run --gpus all, a device request in compose.yaml, or "
            "nvidia.com/gpu in Kubernetes' limits"
        )
        return "this container was given no GPU", remedy
    if not inventory.has_kernel_driver and not inventory.has_device_files:
        return "no NVIDIA driver is loaded", "Install NVIDIA's driver, and see that nvidia-smi works"
    if not inventory.has_driver_library:
        remedy = "Install the driver's libraries; in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return "the driver's library libcuda.so.1 is not found", remedy
    return None


def gpu_driver(facts: Facts) -> Finding | None:
    cards = _asked(facts)
    if cards is None or cards.inventory.software.torch_cuda is None or cards.inventory.software.driver_cuda is None:
        return None
    software, driver = cards.inventory.software, cards.inventory.software.driver_cuda
    assert software.torch_cuda is not None
    newest = ".".join(map(str, driver))
    measured = f"driver {software.driver_version}, which runs CUDA up to {newest}"
    limit = f"torch {software.torch_version} is built for CUDA {software.torch_cuda}; the major version must be run"
    if driver[0] >= int(software.torch_cuda.split(".")[0]):
        return Finding("gpu-driver", Severity.OK, measured, limit)
    remedy = f"Install a newer driver, or a torch built for CUDA {driver[0]}"
    return Finding("gpu-driver", Severity.FAILURE, measured, limit, remedy)


def gpu_architecture(facts: Facts) -> Finding | None:
    cards = _asked(facts)
    if cards is None or not cards.used:
        return None
    measured = ", ".join(sorted({f"{card.name} {_capability(card)}" for card in cards.used}))
    kept = cards.kv_cache_dtype
    has_fp8 = kept.startswith("fp8")
    oldest, what = (_OLDEST_FP8_ARCHITECTURE, f"a KV cache in {kept}") if has_fp8 else (_OLDEST_ARCHITECTURE, "kernels")
    limit = f"compute capability {oldest / 10} or later, which {what} need{'s' if has_fp8 else ''}"
    found = min(card.architecture for card in cards.used)
    if found >= oldest:
        return Finding("gpu-architecture", Severity.OK, measured, limit)
    remedy = f"Use newer cards (Ampere and on), choose them with CUDA_VISIBLE_DEVICES, {_ON_CPU}"
    if found >= _OLDEST_ARCHITECTURE:
        remedy = "Use --kv-cache-dtype auto, or newer cards (Ada, Hopper and on)"
    return Finding("gpu-architecture", Severity.FAILURE, measured, limit, remedy)


def gpu_memory(facts: Facts) -> Finding | None:
    """Of the weights and a step; the KV cache takes what is left, which the worker measures."""
    cards = _asked(facts)
    if cards is None or not cards.used or facts.model is None or facts.model.memory is None:
        return None
    memory = facts.model.memory
    need = (memory.weight_bytes + memory.workspace_bytes) // facts.model.num_local_ranks
    found = [(min(int(card.total_bytes * cards.utilization), card.free_bytes), card) for card in cards.used]
    room, card = min(found, key=lambda pair: pair[0])
    measured = f"weights and a step take {format_bytes(need)} of each card"
    limit = f"they must fit into {_free(card)}, and into --gpu-memory-utilization {cards.utilization:g}"
    if need < room:
        return Finding("gpu-memory", Severity.OK, measured, limit)
    if need < card.free_bytes:
        share = -(-100 * need // card.total_bytes) + 5
        remedy = f"Use --gpu-memory-utilization {min(share, 99) / 100:g}"
    else:
        remedy = "Free the card, serve a smaller model, or divide it with --tensor-parallel-size"
    return Finding("gpu-memory", Severity.FAILURE, measured, limit, remedy)


def _held_by(card: Card) -> str:
    users = [
        f"pid {user.pid} {format_bytes(user.num_bytes)}" if user.num_bytes else f"pid {user.pid}" for user in card.users
    ]
    return f" ({', '.join(users)})" if users else ""


def gpu_links(facts: Facts) -> Finding | None:
    cards = _asked(facts)
    if cards is None or facts.model is None or facts.model.num_local_ranks == 1:
        return None
    places = range(cards.first, cards.first + cards.num_devices)
    links = [link for link in cards.inventory.links if link.first in places and link.second in places]
    if not links:
        return None
    measured = ", ".join(
        f"{link.first}-{link.second} {link.kind}{'' if link.has_p2p else ' without P2P'}" for link in links
    )
    limit = "cards of one replica that read each other's memory (P2P)"
    if all(link.has_p2p for link in links):
        return Finding("gpu-links", Severity.OK, measured, limit)
    remedy = (
        "It serves, with every sum going through host memory: use cards on one switch (nvidia-smi topo -m), or one "
        "card with a smaller model; in a virtual machine let the cards see each other"
    )
    return Finding("gpu-links", Severity.WARNING, measured, limit, remedy)


def gpu_slices(facts: Facts) -> Finding | None:
    cards = _asked(facts)
    if cards is None or not any(card.is_slice or card.is_divided for card in cards.used):
        return None
    limit = "a slice for a worker of one rank, named by its UUID"
    divided = [card for card in cards.used if card.is_divided]
    if divided:
        measured = f"{divided[0].name} {divided[0].uuid} is divided into MIG slices, none of which is chosen"
        remedy = "Set CUDA_VISIBLE_DEVICES to a slice's UUID, which `nvidia-smi -L` lists: MIG-..."
        return Finding("gpu-slices", Severity.FAILURE, measured, limit, remedy)
    measured = f"{len(cards.used)} MIG slices: {', '.join(card.uuid for card in cards.used)}"
    if cards.num_devices > 1:
        remedy = (
            "CUDA shows a process one slice, and slices exchange no sums: use whole cards, or start a worker of one "
            "rank for each slice, with that slice's UUID in its CUDA_VISIBLE_DEVICES"
        )
        return Finding("gpu-slices", Severity.FAILURE, measured, limit, remedy)
    return Finding("gpu-slices", Severity.OK, measured, limit)


def _asked(facts: Facts) -> CardFacts | None:
    return facts.cards if facts.cards is not None and facts.cards.on_gpu else None


def _capability(card: Card) -> str:
    return f"(compute capability {card.architecture / 10})"


CHECKS = (
    Check(
        "gpu-visible",
        "GPUs that were asked for can be seen",
        "The finding says which of the usual causes it is: a torch built for the CPU, a container started without a "
        "device request (`docker run --gpus all`), a missing driver or driver library, or CUDA_VISIBLE_DEVICES that "
        "names no card. Octavo does not fall back to the CPU by itself: `--device cpu` asks for it.",
        gpu_visible,
        processes=("worker",),
    ),
    Check(
        "gpu-driver",
        "The driver runs the CUDA version that torch was built for",
        "A driver runs every CUDA of its major version and of older ones. Install a newer driver, or a torch built for "
        "an older CUDA.",
        gpu_driver,
        processes=("worker",),
    ),
    Check(
        "gpu-architecture",
        "The cards are new enough for the kernels and for the KV cache's precision",
        "Kernels, and bfloat16 with them, need Ampere or later, compute capability 8.0; an fp8 KV cache 8.9 (Ada, "
        "Hopper and later). Quantized weights ask for no more than the kernels do.",
        gpu_architecture,
        processes=("worker",),
    ),
    Check(
        "gpu-memory",
        "The weights and a step fit into the cards' free memory",
        "The finding names the processes that hold the rest. The KV cache takes what weights, workspace and CUDA "
        "graphs leave of `--gpu-memory-utilization`, and of what is free; the worker prints a table of it.",
        gpu_memory,
        processes=("worker",),
    ),
    Check(
        "gpu-links",
        "The cards of a tensor-parallel replica reach each other",
        "Ranks add up their results in every layer. Over NVLink or one PCIe switch that is fast; without P2P it goes "
        "through host memory. The worker measures it once at start and logs the bandwidth.",
        gpu_links,
        processes=("worker",),
    ),
    Check(
        "gpu-slices",
        "A divided card (MIG) is used by a slice's UUID",
        "CUDA sees slices of a card only by their UUID, one for each process: "
        "`CUDA_VISIBLE_DEVICES=MIG-...`, from `nvidia-smi -L`.",
        gpu_slices,
        processes=("worker",),
    ),
)
