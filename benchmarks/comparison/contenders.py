"""Who is compared: how each server is started on the same weights, or why it is left out.

The layout of the peers' directory is described in benchmarks/README.md. It starts no server itself; it runs programs
only to ask their versions.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MODEL_NAME = "compared"
KINDS = ("octavo", "vllm", "llama")
_KV_BYTES = 2 << 30
_MAX_MODEL_LEN = 4096
_LLAMA_SLOTS = 32
_LLAMA_CONTEXT = 40960


@dataclass(frozen=True)
class Contender:
    """A server that can be started: the command without its port, and what it is."""

    name: str
    kind: str
    command: tuple[str, ...]
    port_option: str
    version: str
    environment: dict[str, str] = field(default_factory=dict)

    def settings(self, peers: Path) -> str:
        """The command as someone would type it, with the peers' directory as DIR."""
        words = (*(f"{key}={value}" for key, value in self.environment.items()), *self.command)
        return " ".join(words).replace(f"{sys.executable} -m octavo", "octavo").replace(str(peers), "DIR")


@dataclass(frozen=True)
class Absent:
    """A server that is left out, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Variants:
    """Precisions and settings to compare; each peer is judged by the best of its own on each workload."""

    octavo_dtypes: tuple[str, ...]
    vllm_dtypes: tuple[str, ...]
    vllm_binds: tuple[str, ...]
    llama_types: tuple[str, ...]


def find_contenders(peers: Path, kinds: tuple[str, ...], variants: Variants) -> Iterator[Contender | Absent]:
    """Every server of `kinds`, in the order of KINDS."""
    if "octavo" in kinds:
        yield from (_octavo(peers, dtype) for dtype in variants.octavo_dtypes)
    if "vllm" in kinds:
        yield from (_vllm(peers, dtype, bind) for dtype in variants.vllm_dtypes for bind in variants.vllm_binds)
    if "llama" in kinds:
        yield from (_llama(peers, weights_type) for weights_type in variants.llama_types)


def weights_directory(peers: Path) -> Path:
    """The checkpoint in Hugging Face's format that all serve; its tokenizer is the client's too."""
    return peers / "smollm2"


def _octavo(peers: Path, dtype: str) -> Contender | Absent:
    name = f"octavo {dtype}"
    if not (weights_directory(peers) / "config.json").is_file():
        return Absent(name, f"{weights_directory(peers)} holds no config.json")
    options = ("--served-model-name", MODEL_NAME, "--dtype", dtype, "--max-model-len", str(_MAX_MODEL_LEN))
    return Contender(
        name,
        "octavo",
        (*octavo_command(weights_directory(peers)), *options, "--kv-cache-memory", str(_KV_BYTES)),
        "--http-port",
        octavo_version(),
    )


def octavo_command(model: Path | str) -> tuple[str, ...]:
    """`octavo serve` of this environment, its gRPC port a free one."""
    return (sys.executable, "-m", "octavo", "serve", str(model), "--grpc-port", "0", "--log-level", "info")


def octavo_version() -> str:
    """The installed version and, in a git checkout, the commit and whether it is changed."""
    version = importlib.metadata.version("octavo")
    root = str(Path(__file__).parents[2])
    described = _output("git", "-C", root, "describe", "--always", "--dirty", "--abbrev=10").strip()
    return f"{version} ({described})" if described else version


def _vllm(peers: Path, dtype: str, bind: str) -> Contender | Absent:
    name = f"vllm {dtype}" if bind == "auto" else f"vllm {dtype} bind={bind}"
    program = peers / "vllm/bin/vllm"
    if not program.is_file():
        return Absent(name, f"{program} is not there")
    asked = "import importlib.metadata as m; print(m.version('vllm'))"
    version = _output(str(program.with_name("python")), "-c", asked).strip()
    options = ("--served-model-name", MODEL_NAME, "--dtype", dtype, "--max-model-len", str(_MAX_MODEL_LEN))
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(_KV_BYTES >> 30),
        "VLLM_CPU_OMP_THREADS_BIND": bind,
        "HF_HUB_OFFLINE": "1",
    }
    command = (str(program), "serve", str(weights_directory(peers)), *options)
    return Contender(name, "vllm", command, "--port", version or "unknown", environment)


def _llama(peers: Path, weights_type: str) -> Contender | Absent:
    name = f"llama.cpp {weights_type}"
    program = next(iter(sorted((peers / "llama").rglob("llama-server"))), peers / "llama/llama-server")
    weights = peers / f"smollm2-{weights_type}.gguf"
    for path in (program, weights):
        if not path.is_file():
            return Absent(name, f"{path} is not there")
    # Its shared libraries lie beside the program itself, which may be a link.
    environment = {"LD_LIBRARY_PATH": str(program.resolve().parent)}
    said = re.search(r"version: (.+)", _output(str(program), "--version", environment=environment))
    options = ("-t", str(os.cpu_count() or 1), "-c", str(_LLAMA_CONTEXT), "-np", str(_LLAMA_SLOTS), "-fa", "on")
    command = (str(program), "-m", str(weights), *options, "--alias", MODEL_NAME)
    return Contender(name, "llama", command, "--port", said[1] if said else "unknown", environment)


def _output(*command: str, environment: dict[str, str] | None = None) -> str:
    """What a program prints, on both streams; empty where it can't be run."""
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            env={**os.environ, **(environment or {})},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
