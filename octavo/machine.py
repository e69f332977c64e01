"""What this machine offers a process: usable CPUs, memory, instruction sets, a compiler.

Reads the operating system and control groups, imports nothing heavy, and judges nothing: checks do that.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_COMPILERS = ("c++", "g++", "clang++")
_NO_LIMIT_BYTES = 2**60  # control groups of version 1 write "no limit" as a number just below 2**63


@dataclass(frozen=True)
class MachineFacts:
    """The machine as one process sees it: control-group limits are already taken into account."""

    system: str
    architecture: str
    num_cpus: int
    total_memory_bytes: int
    free_memory_bytes: int
    cpu_flags: frozenset[str]
    python_version: tuple[int, int, int]
    compiler: str | None


@dataclass(frozen=True)
class GroupLimits:
    """What the control groups above this process allow; None where they set no limit."""

    num_cpus: float | None
    total_memory_bytes: int | None
    free_memory_bytes: int | None


def collect_machine(root: Path = Path("/")) -> MachineFacts:
    """Read the machine; `root` stands before /proc and /sys."""
    limits = group_limits(root)
    total, free = _memory(root)
    return MachineFacts(
        system=platform.system(),
        architecture=platform.machine(),
        num_cpus=_usable_cpus(limits.num_cpus),
        total_memory_bytes=_least(total, limits.total_memory_bytes),
        free_memory_bytes=_least(free, limits.free_memory_bytes),
        cpu_flags=_cpu_flags(root),
        python_version=sys.version_info[:3],
        compiler=next(filter(None, map(shutil.which, _COMPILERS)), None),
    )


def usable_cpus() -> int:
    """CPUs this process may keep busy: its affinity, cut to its control groups' quota; at least one."""
    return _usable_cpus(group_limits(Path("/")).num_cpus)


def free_memory_bytes() -> int:
    """Memory that can be had without swapping, within the control groups' limits."""
    return _least(_memory(Path("/"))[1], group_limits(Path("/")).free_memory_bytes)


def group_limits(root: Path) -> GroupLimits:
    """The tightest limits of this process's control groups and their parents, versions 1 and 2."""
    cpus: list[float] = []
    totals: list[tuple[int, int]] = []
    for directory in _group_directories(root, "cpu"):
        cpus += filter(None, [_cpu_quota(directory)])
    for directory in _group_directories(root, "memory"):
        totals += filter(None, [_memory_limit(directory)])
    return GroupLimits(
        num_cpus=min(cpus, default=None),
        total_memory_bytes=min((limit for limit, _ in totals), default=None),
        free_memory_bytes=min((max(0, limit - used) for limit, used in totals), default=None),
    )


def _usable_cpus(quota: float | None) -> int:
    present = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return present if quota is None else max(1, min(present, math.floor(quota)))


def _least(value: int, limit: int | None) -> int:
    return value if limit is None else min(value, limit)


def _group_directories(root: Path, controller: str) -> list[Path]:
    """The group's own directory and every parent that exists, for the controller."""
    membership = root / "proc/self/cgroup"
    if not membership.exists():
        return []
    found: list[Path] = []
    for line in membership.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        own = base / path.lstrip("/")
        # In a container the path may name the host's tree, of which only the root is mounted here.
        found += [
            directory for directory in (own, *own.parents) if directory.is_relative_to(base) and directory.is_dir()
        ]
    return found


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _cpu_quota(directory: Path) -> float | None:
    if (text := _read(directory / "cpu.max")) is not None:
        quota, period = text.split()
        return None if quota == "max" else int(quota) / int(period)
    old_quota, old_period = _read(directory / "cpu.cfs_quota_us"), _read(directory / "cpu.cfs_period_us")
    if old_quota is None or old_period is None or int(old_quota) <= 0:
        return None
    return int(old_quota) / int(old_period)


def _memory_limit(directory: Path) -> tuple[int, int] | None:
    """Limit and use in bytes; the file pages the kernel can drop don't count as used."""
    limit = _read(directory / "memory.max") or _read(directory / "memory.limit_in_bytes")
    used = _read(directory / "memory.current") or _read(directory / "memory.usage_in_bytes")
    if limit is None or used is None or limit == "max" or int(limit) >= _NO_LIMIT_BYTES:
        return None
    statistics = dict(line.split() for line in (_read(directory / "memory.stat") or "").splitlines())
    droppable = int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))
    return int(limit), max(0, int(used) - droppable)


def _memory(root: Path) -> tuple[int, int]:
    """Total and free bytes of the whole machine."""
    table = _read(root / "proc/meminfo")
    if table is not None:
        rows = dict(line.split(":", 1) for line in table.splitlines())
        return tuple(int(rows[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))  # type: ignore[return-value]
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total, min(total, _free_by_vm_stat())


def _free_by_vm_stat() -> int:
    """Free bytes on macOS: pages that are free, or that the system gives up when asked."""
    report = subprocess.run(["vm_stat"], capture_output=True, text=True, check=True).stdout.splitlines()
    page_bytes = int("".join(filter(str.isdigit, report[0])))
    wanted = ("Pages free", "Pages inactive", "Pages speculative", "Pages purgeable")
    counts = [line.split(":", 1) for line in report[1:] if ":" in line]
    return page_bytes * sum(int(count.strip(" .")) for name, count in counts if name in wanted)


def _cpu_flags(root: Path) -> frozenset[str]:
    """Instruction sets by the kernel's names: `flags` on x86, `Features` on ARM; macOS says it by sysctl."""
    table = _read(root / "proc/cpuinfo")
    if table is not None:
        for line in table.splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(value.split())
        return frozenset()
    if sys.platform == "darwin":
        asked = ["sysctl", "-n", "hw.optional.arm.FEAT_BF16"]
        answer = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        return frozenset({"bf16"}) if answer == "1" else frozenset()
    return frozenset()
