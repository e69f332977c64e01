"""How much of the machine other processes take, so that timed runs begin, and stay, on a quiet one.

Reads /proc (Linux). "Own" is this process and its descendants; all else that ran, and what a hypervisor gave to other
guests, is the others'.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class NotQuietError(Exception):
    """The machine did not become quiet in time."""


@dataclass(frozen=True)
class _Reading:
    at_s: float
    busy_s: float
    own_s: float

    @classmethod
    def take(cls) -> _Reading:
        return cls(time.monotonic(), _machine_busy_s(), own_busy_s())


class OthersLoad:
    """Cores that others kept busy on average, since this was made."""

    def __init__(self) -> None:
        self._begun = _Reading.take()

    def cores(self) -> float:
        ended = _Reading.take()
        busy_s = (ended.busy_s - self._begun.busy_s) - (ended.own_s - self._begun.own_s)
        return max(0.0, busy_s / max(ended.at_s - self._begun.at_s, 1e-3))


def wait_until_quiet(most_cores: float, timeout_s: float, interval_s: float = 2.0) -> float:
    """Return the others' load once it is at most `most_cores` for one interval.

    Raises NotQuietError after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        load = OthersLoad()
        time.sleep(interval_s)
        cores = load.cores()
        if cores <= most_cores:
            return cores
        if time.monotonic() > deadline:
            raise NotQuietError(
                f"other processes keep {cores:.2f} cores busy, after {timeout_s:.0f} s of waiting for at most "
                f"{most_cores:.2f}; stop them, wait longer with --quiet-wait, or pass --allow-busy for a trial"
            )


def _machine_busy_s() -> float:
    """Seconds of all cores together in user, nice, system and stolen time."""
    words = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    ticks = [int(word) for word in words[1:]]
    return (ticks[0] + ticks[1] + ticks[2] + ticks[7]) / _TICKS_PER_S


def own_busy_s() -> float:
    """Seconds of this process and its descendants, those included that they have waited for."""
    spent: dict[int, int] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            stat = (folder / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # it ended meanwhile
        # The command's name, in brackets, may hold spaces and brackets: fields are counted from the last one.
        words = stat.rpartition(")")[2].split()
        pid = int(folder.name)
        children[int(words[1])].append(pid)
        spent[pid] = sum(int(word) for word in words[11:15])
    total, pending = 0, [os.getpid()]
    while pending:
        pid = pending.pop()
        total += spent.get(pid, 0)
        pending += children[pid]
    return total / _TICKS_PER_S
