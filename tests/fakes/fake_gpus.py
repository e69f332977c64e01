"""Cards and an NVML that are not there: facts for the checks, and a module like pynvml that reports them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from octavo.gpus import Card, CardLink, CardUser, CudaSoftware, GpuInventory

GIB = 2**30

H100 = Card("GPU-1", "NVIDIA H100", 90, 80 * GIB, 78 * GIB)
SOFTWARE = CudaSoftware("2.13.0+cu130", "13.0", "580.65", (13, 0))


def inventory(*cards: Card, links: tuple[CardLink, ...] = (), **changes: Any) -> GpuInventory:
    """A machine with these cards and nothing wrong, but for `changes`."""
    values: dict[str, Any] = {
        "software": SOFTWARE,
        "has_device_files": True,
        "has_driver_library": True,
        "has_kernel_driver": True,
        "in_container": False,
        "visible_devices": None,
        **changes,
    }
    return GpuInventory(cards=cards, links=links, **values)


class NVMLError(Exception):
    """What pynvml raises."""


@dataclass(frozen=True)
class FakeCard:
    """One card as NVML knows it."""

    card: Card
    # Cards, by index, that it reads from, and those that NVLink joins it to.
    peers: frozenset[int] = frozenset()
    joined: frozenset[int] = frozenset()


@dataclass
class FakeNvml:
    """Answers what `octavo.gpus` asks; `is_broken` as a library without a driver does."""

    cards: list[FakeCard] = field(default_factory=list)
    is_broken: bool = False
    NVMLError: type[Exception] = NVMLError

    def nvmlInit(self) -> None:
        if self.is_broken:
            raise NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= len(self.cards):
            raise NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        found = [index for index, each in enumerate(self.cards) if each.card.uuid == uuid]
        if not found:
            raise NVMLError("Not Found")
        return found[0]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        card = self.cards[handle].card
        return SimpleNamespace(total=card.total_bytes, free=card.free_bytes)

    def nvmlDeviceIsMigDeviceHandle(self, handle: int) -> int:
        return int(self.cards[handle].card.is_slice)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return divmod(self.cards[handle].card.architecture, 10)

    def nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:
        return (int(self.cards[handle].card.is_divided),) * 2

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        users = self.cards[handle].card.users
        return [SimpleNamespace(pid=user.pid, usedGpuMemory=user.num_bytes) for user in users]

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return self.cards[handle].card.uuid.encode()

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.cards[handle].card.name

    def nvmlDeviceGetTopologyCommonAncestor(self, first: int, second: int) -> int:
        return 20

    def nvmlDeviceGetP2PStatus(self, first: int, second: int, kind: int) -> int:
        card = self.cards[first]
        return 0 if second in {0: card.peers, 2: card.joined}[kind] else 4

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13000


USED = CardUser(77, 60 * GIB)
