"""Collects the facts that the checks judge: the edge where files, packages, sockets and the machine are read.

Imports nothing heavy: versions come from package metadata, models from their headers.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.checks.types import Facts, KernelFacts, ModelFacts, PackageFacts, PortFacts
from octavo.gpus import CardFacts, collect_gpus
from octavo.machine import MachineFacts, collect_machine
from octavo.memory import KvRequest, ModelShape, QuantizedPart, predict_ranks
from octavo.ports import port_in_use, port_owner
from octavo.precision import DTYPE_BYTES, resolve_dtype
from octavo.sharding import ShardingError
from octavo.sizes import format_bytes

if TYPE_CHECKING:
    from octavo.sources import ModelSource

_DISTRIBUTION = "octavo"
_KERNELS_FOLDER = "cpu"
_BUILD_ERROR_FILE = "build_error.txt"
_LIBRARY_PATTERNS = ("*.so", "*.dylib", "*.pyd")


@dataclass(frozen=True)
class PortRequest:
    """A port the start wants, and the option that chooses it."""

    flag: str
    host: str
    port: int


@dataclass(frozen=True)
class KvOptions:
    """What the worker's options say of the KV pool."""

    block_size: int
    max_num_seqs: int
    num_kv_blocks: int | None
    kv_cache_memory: int | None
    kv_memory_fraction: float
    host_bytes: int = 0


@dataclass(frozen=True)
class ModelRequest:
    """A model, and the options that decide how much memory it takes."""

    name: str
    dtype: str
    max_model_len: int | None
    max_num_batched_tokens: int
    kv: KvOptions
    num_replicas: int = 1
    """Workers on this machine that each hold all of it."""
    num_ranks: int = 1
    """Ranks of a worker, each with a part of the model, and how many of them are on this machine."""
    num_local_ranks: int = 1
    device: str = "cpu"
    gpu_memory_utilization: float = 0.9
    kv_cache_dtype: str = "auto"


def card_facts(model: ModelRequest) -> CardFacts:
    """What the workers on this machine will ask of GPUs, and what there is."""
    num_devices = model.num_replicas * model.num_local_ranks
    share, kept = model.gpu_memory_utilization, model.kv_cache_dtype
    return CardFacts(collect_gpus(), model.device, num_devices, share, kept)


def collect(ports: Iterable[PortRequest], model: ModelRequest | None) -> Facts:
    """Everything the checks look at. May fetch a model that is named by its hub name or the default's."""
    machine = collect_machine()
    cards = None if model is None else card_facts(model)
    return Facts(
        machine=machine,
        packages=package_facts(),
        kernels=kernel_facts(),
        ports=tuple(port_facts(port) for port in ports),
        model=None if model is None else model_facts(model, machine, on_gpu=cards is not None and cards.on_gpu),
        cards=cards,
    )


def describe(machine: MachineFacts) -> list[str]:
    """The machine in a line, as `octavo doctor` heads its table."""
    python = ".".join(map(str, machine.python_version))
    return [
        f"{machine.system} {machine.architecture}, {machine.num_cpus} CPUs usable, "
        f"{format_bytes(machine.free_memory_bytes)} of {format_bytes(machine.total_memory_bytes)} memory free, "
        f"Python {python}"
    ]


def package_facts() -> tuple[PackageFacts, ...]:
    """Installed packages that this distribution declares a range for, those of development left out."""
    try:
        requirements = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that was never installed
        return ()
    ranges: dict[str, str] = {}
    for requirement in requirements:
        match = re.match(r"([\w.-]+)\s*\(?([^;)\[]*)\)?", requirement)
        if match is None or 'extra == "dev"' in requirement or match[1] == _DISTRIBUTION:
            continue
        ranges[match[1]] = match[2].replace(" ", "")
    return tuple(
        PackageFacts(name, version, ranges[name])
        for name in sorted(ranges)
        if (version := _installed(name)) is not None
    )


def kernel_facts(kernels: Path | None = None) -> KernelFacts | None:
    """Whether the C++ kernels were built, found without importing them; None where there are none to build."""
    if kernels is None:
        spec = importlib.util.find_spec("kernels")
        if spec is None or spec.origin is None:
            return None
        kernels = Path(spec.origin).parent
    folder = kernels / _KERNELS_FOLDER
    if not folder.is_dir():
        return None
    built = any(path for pattern in _LIBRARY_PATTERNS for path in folder.rglob(pattern))
    report = folder / _BUILD_ERROR_FILE
    return KernelFacts(built, report.read_text(encoding="utf-8") if report.exists() else None)


def port_facts(request: PortRequest) -> PortFacts:
    """Try to bind the port, and let go of it again."""
    error = None
    in_use = False
    try:
        in_use = port_in_use(request.host, request.port)
    except OSError as problem:
        error = problem.strerror or str(problem)
    owner = port_owner(request.port) if in_use else None
    return PortFacts(request.flag, request.host, request.port, in_use, owner, error)


def model_facts(request: ModelRequest, machine: MachineFacts, *, on_gpu: bool = False) -> ModelFacts:
    """Find the model, look at its files' headers, and predict what serving it will take."""
    from octavo.sources import SourceError, inspect_files, resolve

    try:
        source = resolve(request.name)
    except SourceError as error:
        return _unread(request, None, str(error), ())
    directory = str(source.directory)
    problems = tuple(str(problem) for problem in inspect_files(source))
    if problems:
        return _unread(request, directory, None, problems)
    config_path = source.directory / "config.json"
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
        shape = ModelShape.from_config(config)
        part = None if source.is_gguf else _quantized_part(source, config, shape)
        if on_gpu:
            shape = replace(shape, quantized=part)
    except (KeyError, TypeError, ValueError, SourceError) as error:
        return _unread(request, directory, None, (f"{config_path}: not a model that can be served: {_said(error)}",))
    stored = None if source.is_gguf else config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = resolve_dtype(
        request.dtype, stored if stored in DTYPE_BYTES else None, None if on_gpu else machine.cpu_flags
    )
    return _read(request, directory, shape, dtype, machine)


def _read(request: ModelRequest, directory: str, shape: ModelShape, dtype: str, machine: MachineFacts) -> ModelFacts:
    context = request.max_model_len or shape.max_model_len
    kv = KvRequest(
        block_size=request.kv.block_size,
        max_model_len=context,
        max_num_seqs=request.kv.max_num_seqs,
        num_kv_blocks=request.kv.num_kv_blocks,
        kv_cache_memory=request.kv.kv_cache_memory,
        kv_memory_fraction=request.kv.kv_memory_fraction,
        host_bytes=request.kv.host_bytes,
    )
    try:
        parts = [shape.part(rank, request.num_ranks) for rank in range(request.num_local_ranks)]
        memory, pool = predict_ranks(parts, dtype, kv, request.max_num_batched_tokens, machine)
    except ShardingError:  # which a check of its own says
        memory, pool = None, None
    return ModelFacts(
        name=request.name,
        directory=directory,
        missing=None,
        file_problems=(),
        dtype=dtype,
        model_limit_tokens=shape.max_model_len,
        max_model_len_tokens=context,
        memory=memory,
        kv_pool=pool,
        num_replicas=request.num_replicas,
        num_ranks=request.num_ranks,
        num_local_ranks=request.num_local_ranks,
        divided_sizes=shape.divided_sizes,
    )


def _quantized_part(source: ModelSource, config: Mapping[str, Any], shape: ModelShape) -> QuantizedPart | None:
    """What a GPU keeps quantized; None where that is nothing. Raises SourceError for a method that is not read."""
    from octavo.sources.kept_matrices import kept_matrices
    from octavo.sources.quantization_config import parse_quantization

    quantization = parse_quantization(config)
    if quantization is None:
        return None
    kept = kept_matrices(source, quantization)
    if kept.num_weights == 0:
        return None
    return QuantizedPart(min(1.0, kept.num_weights / shape.num_matrix_weights), kept.num_bytes / kept.num_weights)


def _unread(request: ModelRequest, directory: str | None, missing: str | None, problems: Sequence[str]) -> ModelFacts:
    return ModelFacts(request.name, directory, missing, tuple(problems), None, None, None, None, None)


def _said(error: Exception) -> str:
    """The error in words; a KeyError's only word is the key."""
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
