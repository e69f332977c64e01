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
from octavo.bench.processes import cpu_seconds, tree_of
from octavo.ports import free_port
from octavo.sources import DEFAULT_MODEL
from octavo.sources.cache import cache_root
from octavo.sources.default_model import fetch_default_model

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
    """The command of each octavo process from this one down, and the CPU seconds that it has taken."""
    for pid in tree_of(ancestor):
        command, seconds = _command_of(pid), cpu_seconds(pid)
        if command is not None and seconds is not None:
            yield command, seconds


def _command_of(pid: int) -> str | None:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None  # it ended meanwhile
    return next((word for word in words[1:4] if word in _COMMANDS), None)
