"""Reading a machine from its /proc and /sys, control groups included."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.machine import GroupLimits, collect_machine, free_memory_bytes, group_limits, usable_cpus

GIB = 2**30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_groups_of_version_2_are_followed_to_the_root(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/pod/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/box/memory.current": "1\n",
        },
    )
    assert group_limits(root) == GroupLimits(1.5, 4 * GIB, 2 * GIB)


def test_groups_of_version_1_are_read(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/box\n4:memory:/box\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{2 * GIB}\n",
        },
    )
    assert group_limits(root) == GroupLimits(3.0, GIB, 0)


def test_a_machine_without_groups_has_no_limits(tmp_path: Path) -> None:
    assert group_limits(tmp_path) == GroupLimits(None, None, None)


@pytest.mark.parametrize(("name", "flag"), [("flags\t\t", "avx512_bf16"), ("Features\t", "bf16")])
def test_memory_and_instruction_sets_are_read(tmp_path: Path, name: str, flag: str) -> None:
    root = tree(
        tmp_path,
        {
            "proc/cpuinfo": f"processor\t: 0\n{name}: fpu {flag}\n",
            "proc/meminfo": f"MemTotal: {8 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {6 * 2**20} kB\n",
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{GIB}\n",
            "sys/fs/cgroup/cpu.max": "50000 100000\n",
        },
    )
    machine = collect_machine(root)
    assert (machine.total_memory_bytes, machine.free_memory_bytes) == (2 * GIB, GIB)
    assert machine.cpu_flags == {"fpu", flag}
    assert machine.num_cpus == 1  # half a CPU is still one thread


def test_this_machine_can_be_read() -> None:
    machine = collect_machine()
    assert machine.num_cpus == usable_cpus() >= 1
    assert 0 < machine.free_memory_bytes <= machine.total_memory_bytes
    assert free_memory_bytes() > 0
