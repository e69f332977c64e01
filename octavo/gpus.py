"""NVIDIA's GPUs as this process may use them, found without torch: through NVML, where it is there, and the system.

Reads the environment, /dev, /proc and NVML, and judges nothing: checks do that.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_VISIBLE = "CUDA_VISIBLE_DEVICES"
# How NVML counts the ways between two cards, from near to far: nvmlGpuTopologyLevel_t.
_LINKS = {
    0: "the same board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "a PCIe host bridge",
    40: "the same NUMA node",
    50: "the link between sockets",
}
# nvmlGpuP2PCapsIndex_t: whether one card reads the other's memory, and whether over NVLink.
_P2P_READ, _P2P_NVLINK = 0, 2


@dataclass(frozen=True)
class CardUser:
    """A process that holds memory of a card."""

    pid: int
    num_bytes: int | None


@dataclass(frozen=True)
class Card:
    """One visible card, or a slice of one (`is_slice`, MIG). `architecture` is 90 for compute capability 9.0."""

    uuid: str
    name: str
    architecture: int
    total_bytes: int
    free_bytes: int
    users: tuple[CardUser, ...] = ()
    is_slice: bool = False
    # Whether the card is divided into slices, none of which is this.
    is_divided: bool = False


@dataclass(frozen=True)
class CardLink:
    """What is between two visible cards, by their places among them."""

    first: int
    second: int
    kind: str
    has_p2p: bool


@dataclass(frozen=True)
class CudaSoftware:
    """What is installed: the CUDA version that torch was built for (None: a CPU build), and the driver's newest."""

    torch_version: str | None
    torch_cuda: str | None
    driver_version: str | None
    driver_cuda: tuple[int, int] | None


@dataclass(frozen=True)
class GpuInventory:
    """What there is of GPUs. `cards` are those that the process may use, in CUDA's order."""

    cards: tuple[Card, ...]
    links: tuple[CardLink, ...]
    software: CudaSoftware
    # Device files of GPUs, and whether the driver's user library can be found.
    has_device_files: bool
    has_driver_library: bool
    # Whether the kernel has a driver loaded, which a container sees even when it was given no device.
    has_kernel_driver: bool
    in_container: bool
    visible_devices: str | None
    # Why NVML said nothing, where it did not.
    nvml_problem: str | None = None

    @property
    def has_signs(self) -> bool:
        """Whether this machine has a GPU, by anything that says so; a torch that could use one says nothing."""
        return bool(self.cards) or self.has_device_files or self.has_kernel_driver


def collect_gpus(environment: Mapping[str, str] = os.environ, root: Path = Path("/"), nvml: Any = None) -> GpuInventory:
    """Looks; `root` stands before /dev and /proc, `nvml` for the module pynvml, which is imported when not given."""
    problem: str | None = None
    cards: tuple[Card, ...] = ()
    links: tuple[CardLink, ...] = ()
    driver: tuple[str | None, tuple[int, int] | None] = (None, None)
    try:
        nvml = nvml or importlib.import_module("pynvml")
    except ModuleNotFoundError:
        problem = "nvidia-ml-py is not installed; pip install 'octavo[nvml]' brings it"
    else:
        try:
            nvml.nvmlInit()
            handles = list(visible_handles(nvml, environment.get(_VISIBLE)))
            cards = tuple(_card(nvml, handle) for handle in handles)
            links = tuple(_links(nvml, handles))
            driver = _driver(nvml)
        except nvml.NVMLError as error:
            problem = str(error)
    torch_version, torch_cuda = _torch()
    return GpuInventory(
        cards=cards,
        links=links,
        software=CudaSoftware(torch_version, torch_cuda, *driver),
        has_device_files=any((root / "dev").glob("nvidia[0-9]*")),
        has_driver_library=ctypes.util.find_library("cuda") is not None or _has_driver_library(root),
        has_kernel_driver=(root / "proc/driver/nvidia/version").exists(),
        in_container=(root / ".dockerenv").exists() or (root / "run/.containerenv").exists(),
        visible_devices=environment.get(_VISIBLE),
        nvml_problem=problem,
    )


def visible_handles(nvml: Any, visible: str | None) -> Iterable[Any]:
    """The cards that the variable lets this process see, by index or UUID, slices too; all when it is unset.

    As CUDA reads it, a UUID may be cut short, and the list ends at the first word that names no card.
    """
    if visible is None:
        return _all_handles(nvml)
    handles = []
    for word in (word.strip() for word in visible.split(",")):
        try:
            handles.append(_named(nvml, word))
        except nvml.NVMLError:
            break
    return handles


def _named(nvml: Any, word: str) -> Any:
    """The card of that index or UUID, or whose UUID alone begins so. Raises NVMLError for none."""
    if word.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(word))
    try:
        return nvml.nvmlDeviceGetHandleByUUID(word)
    except nvml.NVMLError:
        if not word.startswith("GPU-"):
            raise
        found = [handle for handle in _all_handles(nvml) if nvml_text(nvml.nvmlDeviceGetUUID(handle)).startswith(word)]
        if len(found) != 1:
            raise
        return found[0]


def _all_handles(nvml: Any) -> list[Any]:
    return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]


def _card(nvml: Any, handle: Any) -> Card:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    is_slice = bool(_asked(nvml, lambda: nvml.nvmlDeviceIsMigDeviceHandle(handle), default=False))
    whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if is_slice else handle
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(whole)
    modes = _asked(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle), default=(0, 0))
    users = _asked(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle), default=())
    return Card(
        uuid=nvml_text(nvml.nvmlDeviceGetUUID(handle)),
        name=nvml_text(nvml.nvmlDeviceGetName(handle)),
        architecture=10 * major + minor,
        total_bytes=memory.total,
        free_bytes=memory.free,
        users=tuple(CardUser(user.pid, user.usedGpuMemory) for user in users),
        is_slice=is_slice,
        is_divided=not is_slice and bool(modes[0]),
    )


def _links(nvml: Any, handles: list[Any]) -> Iterable[CardLink]:
    for second in range(len(handles)):
        for first in range(second):
            pair = handles[first], handles[second]
            yield CardLink(first, second, _link_kind(nvml, *pair), _reaches(nvml, *pair, _P2P_READ))


def _link_kind(nvml: Any, first: Any, second: Any) -> str:
    """NVLink where these two are joined by it, else the way over the bus."""
    if _reaches(nvml, first, second, _P2P_NVLINK):
        return "NVLink"
    level = _asked(nvml, lambda: nvml.nvmlDeviceGetTopologyCommonAncestor(first, second), default=None)
    return _LINKS.get(level, "an unknown link") if level is not None else "an unknown link"


def _reaches(nvml: Any, first: Any, second: Any, how: int) -> bool:
    status = _asked(nvml, lambda: nvml.nvmlDeviceGetP2PStatus(first, second, how), default=None)
    return bool(status == 0)


def _driver(nvml: Any) -> tuple[str | None, tuple[int, int] | None]:
    version = _asked(nvml, lambda: nvml_text(nvml.nvmlSystemGetDriverVersion()), default=None)
    number = _asked(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2, default=None)
    return version, None if number is None else (number // 1000, number % 1000 // 10)


def _asked(nvml: Any, ask: Callable[[], Any], *, default: Any) -> Any:
    """What NVML answers, or `default` where this card or driver does not say."""
    try:
        return ask()
    except nvml.NVMLError:
        return default


def _torch() -> tuple[str | None, str | None]:
    """(version, the CUDA version it was built for) of the installed torch, which is not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None, None
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition("=")
            found[name.split(":")[0].strip()] = value.strip().strip("'\"")
    cuda = found.get("cuda")
    return found.get("__version__"), None if cuda in (None, "None", "") else cuda


def _has_driver_library(root: Path) -> bool:
    """libcuda.so.1, which comes with the driver, in the usual places."""
    places = (
        "usr/lib/x86_64-linux-gnu",
        "usr/lib/aarch64-linux-gnu",
        "usr/lib64",
        "usr/local/nvidia/lib64",
        "usr/lib/wsl/lib",
    )
    return any((root / place / "libcuda.so.1").exists() for place in places)


def nvml_text(name: str | bytes) -> str:
    """What NVML names a thing: older bindings give bytes."""
    return name.decode() if isinstance(name, bytes) else name


@dataclass(frozen=True)
class CardFacts:
    """What a start asks of GPUs, and what there is. `num_devices` is one for each rank of each worker here."""

    inventory: GpuInventory
    device: str
    num_devices: int = 1
    utilization: float = 0.9
    kv_cache_dtype: str = "auto"

    @property
    def on_gpu(self) -> bool:
        """Whether the start means to compute on GPUs."""
        return self.device.startswith("cuda") or (self.device == "auto" and self.inventory.has_signs)

    @property
    def first(self) -> int:
        """The number of the first device that it takes."""
        return int(self.device.partition(":")[2] or 0)

    @property
    def used(self) -> tuple[Card, ...]:
        """The cards that it takes, as far as they are visible."""
        return self.inventory.cards[self.first : self.first + self.num_devices] if self.on_gpu else ()
