"""Octavo's start on the default model, timed to its first token over HTTP: cold, and with the GGUF file converted.

Knows caches and processes; measures nothing else of the server.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.comparison.contenders import MODEL_NAME, octavo_command
from benchmarks.comparison.serving import serving
from octavo.ports import free_port
from octavo.sources import DEFAULT_MODEL
from octavo.sources.cache import cache_root
from octavo.sources.default_model import fetch_default_model

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_COMMANDS = ("serve", "router", "scheduler", "worker")


@dataclass(frozen=True)
class Start:
    """Seconds from the start of `octavo serve` to its first token, and CPU seconds of each process until then."""

    first_token_s: float
    cpu_s: dict[str, float]


def fresh_cache(folder: Path) -> Path:
    """A cache that holds the default model's file, downloaded if need be, and nothing made of it."""
    fetch_default_model()
    cache = folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    shutil.copytree(cache_root() / "default", cache / "default")
    return cache


def measure_start(cache: Path, log: Path, timeout_s: float) -> Start:
    """One start on this cache. Raises StartError when no token comes."""
    command = (*octavo_command(DEFAULT_MODEL), "--served-model-name", MODEL_NAME, "--http-port", str(free_port()))
    with serving(command, {"OCTAVO_CACHE": str(cache)}, MODEL_NAME, log, timeout_s) as server:
        return Start(server.first_token_s, dict(cpu_of_descendants(os.getpid())))


def cpu_of_descendants(ancestor: int) -> Iterator[tuple[str, float]]:
    """The command of each octavo process below this one, and the CPU seconds that it has taken."""
    parents, found = {}, {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            stat = (folder / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # it ended meanwhile
        # The command's name, in brackets, may hold spaces and brackets: fields are counted from the last one.
        fields = stat.rpartition(")")[2].split()
        parents[int(folder.name)] = int(fields[1])
        command = next((word for word in words[1:4] if word in _COMMANDS), None)
        found[int(folder.name)] = (command, (int(fields[11]) + int(fields[12])) / _TICKS_PER_S)
    for pid, (command, seconds) in found.items():
        above = pid
        while above in parents and above != ancestor:
            above = parents[above]
        if command is not None and above == ancestor:
            yield command, seconds
