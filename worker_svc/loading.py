"""From a config to a worker that can produce tokens: the phases of the start after the imports, in order.

model -> tokenizer -> weights -> kv -> warm-up. Each phase is a function of what the earlier ones found. Knows files and
memory; must not know whom the worker serves.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from kernels.api import Backend, KVCache, KVCacheSpec
from kernels.select import open_backend
from octavo.internal.v1 import types_pb2, worker_pb2
from octavo.machine import MachineFacts, collect_machine, usable_cpus
from octavo.memory import ModelShape, dtype_reason, resolve_dtype
from octavo.model_families import ModelConfigError
from octavo.phases import Phases
from octavo.process import StartError
from octavo.sizes import format_bytes
from octavo.sources import ModelSource, end_token_ids, resolve, tokenizer_hash, vocabulary_facts
from worker_svc.config import WorkerConfig
from worker_svc.fingerprint import model_fingerprint, numerics_fingerprint
from worker_svc.kv_cache import memory_table, model_shape, resident_bytes, resolve_max_model_len, size_memory
from worker_svc.model.config import ModelConfig
from worker_svc.model.decoder import Decoder, build_decoder
from worker_svc.model.families import parse_config
from worker_svc.model.names import expected_shapes
from worker_svc.process_memory import return_freed_memory
from worker_svc.rows import RowLimits
from worker_svc.runner import Runner, RunnerLimits
from worker_svc.threads import StepThreads, watched_threads
from worker_svc.warm_up import PROBE_TEXT, warm_up
from worker_svc.weights import Checkpoint, ExpectedTensor, WeightsError, load_weights, open_checkpoint

_LOG = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class LoadedWorker:
    """A worker that has produced a token, and what it says of itself; Hello's incarnation and name are not set."""

    runner: Runner
    hello: worker_pb2.Hello
    # None: their number is fixed.
    threads: StepThreads | None


@dataclass(frozen=True)
class _Model:
    """What the model phase found: files, architecture, precision."""

    source: ModelSource
    config: ModelConfig
    shape: ModelShape
    dtype: str
    machine: MachineFacts


@dataclass(frozen=True)
class _Vocabulary:
    """What the tokenizer phase found; `size` counts the ids that may be sampled."""

    size: int
    end_token_ids: tuple[int, ...]
    tokenizer_hash: str
    probe_token_ids: tuple[int, ...]


def load(config: WorkerConfig, phases: Phases) -> LoadedWorker:
    """Runs the phases. Raises StartError, SourceError or MemoryError with a cause that the operator can mend."""
    with phases.phase("model"):
        model = _find_model(config)
    with phases.phase("tokenizer"):
        vocabulary = _read_vocabulary(model)
    backend = _open_backend(config)
    threads = watched_threads(config.num_threads, usable_cpus(), _setter(backend))
    num_tensors = len(expected_shapes(model.config))
    with phases.phase("weights", total=num_tensors) as advance:
        decoder, fingerprint = _load_decoder(model, backend, advance)
        return_freed_memory()
    with phases.phase("kv"):
        cache = _allocate_cache(config, model, backend)
        host_cache = _allocate_host_cache(config, backend, cache)
    limits = RunnerLimits(
        RowLimits(
            num_slots=config.max_num_seqs,
            max_model_len=model.shape.max_model_len,
            block_size=config.block_size,
            num_blocks=cache.spec.num_blocks,
            vocab_size=vocabulary.size,
        ),
        max_step_tokens=config.max_num_batched_tokens,
    )
    runner = Runner(decoder, backend, cache, limits, host_cache)
    with phases.phase("warm-up"):
        _warm_up(runner, vocabulary)
    info = _model_info(config, model, vocabulary, backend, fingerprint)
    hello = _hello(limits, info, host_cache.spec.num_blocks if host_cache is not None else 0)
    return LoadedWorker(runner, hello, threads)


def _open_backend(config: WorkerConfig) -> Backend:
    try:
        return open_backend(config.kernels, config.num_threads or usable_cpus())
    except RuntimeError as error:
        raise StartError(f"--kernels {config.kernels}: {error}") from error


def _setter(backend: Backend) -> Callable[[int], None]:
    """Sets the number of threads and has them begin at once, so that whoever watches threads can find them."""

    def set_num_threads(num_threads: int) -> None:
        backend.set_num_threads(num_threads)
        torch.zeros(2**17)  # torch divides no less than 32,768 elements

    return set_num_threads


def _find_model(config: WorkerConfig) -> _Model:
    source = resolve(config.model)
    path = source.directory / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        parsed = parse_config(fields)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise StartError(f"{path} cannot be read: {error}") from error
    except ModelConfigError as error:
        raise StartError(f"{path.parent}: {error}") from error
    machine = collect_machine()
    stored = None if source.is_gguf else fields.get("dtype") or fields.get("torch_dtype") or "float32"
    dtype = resolve_dtype(config.dtype, stored, machine.cpu_flags)
    if dtype not in _DTYPES:
        raise StartError(
            f"{path}: dtype {dtype} is not one that the worker computes in; choose --dtype from {', '.join(_DTYPES)}"
        )
    shape = model_shape(parsed, resolve_max_model_len(config, parsed))
    _LOG.info(
        "model %s: %s, %d layers, %.0f M parameters",
        source.name,
        parsed.architecture,
        parsed.num_layers,
        shape.num_parameters / 1e6,
    )
    _LOG.info("option --dtype is %s: %s", dtype, dtype_reason(config.dtype, stored, machine.cpu_flags))
    limit = "the model's own limit" if config.max_model_len is None else "as given"
    _LOG.info("option --max-model-len is %d: %s", shape.max_model_len, limit)
    return _Model(source, parsed, shape, dtype, machine)


def _read_vocabulary(model: _Model) -> _Vocabulary:
    """Raises StartError when the tokenizer knows ids for which the embedding has no row."""
    directory, num_rows = model.source.directory, model.config.num_embedding_rows
    facts = vocabulary_facts(directory)
    if facts.highest_token_id >= num_rows:
        raise StartError(
            f"{directory / 'tokenizer.json'} has token id {facts.highest_token_id}, the embedding has {num_rows} rows "
            "(vocab_size): the tokenizer does not belong to these weights; use the model's own"
        )
    size = facts.highest_token_id + 1
    ends = sorted(end_token_ids(directory))
    if beyond := [token_id for token_id in ends if token_id >= size]:
        _LOG.warning("end ids %s are not in the tokenizer's vocabulary of %d and are never sampled", beyond, size)
    probe = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(PROBE_TEXT).ids
    return _Vocabulary(
        size=size,
        end_token_ids=tuple(token_id for token_id in ends if token_id < size),
        tokenizer_hash=tokenizer_hash(directory),
        probe_token_ids=tuple(probe),
    )


def _load_decoder(model: _Model, backend: Backend, advance: Callable[[int], None]) -> tuple[Decoder, str]:
    """The decoder with its weights, and the model's fingerprint."""
    dtype = _DTYPES[model.dtype]
    try:
        checkpoint = open_checkpoint(model.source, dtype)
        try:
            return _pack_decoder(model, backend, checkpoint, advance), _fingerprint(model, checkpoint)
        finally:
            checkpoint.close()
    except WeightsError as error:
        raise StartError(str(error)) from error


def _pack_decoder(model: _Model, backend: Backend, checkpoint: Checkpoint, advance: Callable[[int], None]) -> Decoder:
    """A tensor counts half when it is loaded and half when it is packed: either may be what takes the time."""
    expected = {name: ExpectedTensor(shape) for name, shape in expected_shapes(model.config).items()}
    with tqdm(total=len(expected), desc="weights", unit="tensor", disable=None, leave=False) as bar:
        num_halves = 0

        def count_half() -> None:
            nonlocal num_halves
            num_halves += 1
            if num_halves % 2 == 0:
                bar.update(1)
                advance(num_halves // 2)

        loaded = load_weights(expected, checkpoint, _DTYPES[model.dtype], lambda *_: count_half())

        def take(name: str) -> Tensor:
            count_half()
            return loaded.pop(name)

        return build_decoder(model.config, take, backend, model.shape.max_model_len)


def _fingerprint(model: _Model, checkpoint: Checkpoint) -> str:
    served_length = model.shape.max_model_len if model.config.depends_on_length else None
    return model_fingerprint(model.source, {spec.file for spec in checkpoint.specs().values()}, served_length)


def _allocate_cache(config: WorkerConfig, model: _Model, backend: Backend) -> KVCache:
    memory = size_memory(config, model.shape, model.dtype, collect_machine(), resident_bytes())
    _LOG.info("%s", memory_table(memory, model.shape, model.dtype, config))
    spec = KVCacheSpec(
        num_layers=model.config.num_layers,
        num_blocks=memory.pool.num_blocks,
        block_size=config.block_size,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        dtype=_DTYPES[model.dtype],
    )
    try:
        return backend.allocate_kv_cache(spec)
    except MemoryError as error:
        raise StartError(f"{error}; lower --kv-cache-memory or --num-kv-blocks") from error


def _allocate_host_cache(config: WorkerConfig, backend: Backend, cache: KVCache) -> KVCache | None:
    """The second tier, in host memory; None without --swap-space. Raises StartError for more than is free."""
    num_bytes = config.swap_bytes
    if num_bytes == 0:
        return None
    block_bytes = cache.spec.bytes_per_block
    free = collect_machine().free_memory_bytes
    if num_bytes > free or num_bytes < block_bytes:
        raise StartError(
            f"--swap-space {config.swap_space:g}: a block takes {format_bytes(block_bytes)} and {format_bytes(free)} "
            "are free beside weights, KV cache and workspace; use a size between the two, or 0 for no host tier"
        )
    _LOG.info("host tier: %d blocks, %s", num_bytes // block_bytes, format_bytes(num_bytes))
    return backend.allocate_kv_cache(replace(cache.spec, num_blocks=num_bytes // block_bytes))


def _warm_up(runner: Runner, vocabulary: _Vocabulary) -> None:
    probe = warm_up(runner, vocabulary.probe_token_ids)
    if probe.is_suspicious:
        _LOG.warning("tokenizer and weights may not belong together: on plain English, %s", probe)
    else:
        _LOG.info("probe on plain English: %s", probe)


def _model_info(
    config: WorkerConfig, model: _Model, vocabulary: _Vocabulary, backend: Backend, fingerprint: str
) -> types_pb2.ModelInfo:
    info = backend.info
    if not info.batch_invariant:
        _LOG.warning("answers may depend on what else runs: %s", info.invariance_note)
    versions = {name: importlib.metadata.version(name) for name in ("octavo", "torch")}
    _LOG.info("kernels %s (%s), torch %s", info.name, info.variant, versions["torch"])
    return types_pb2.ModelInfo(
        name=config.served_model_name or served_name(config.model),
        fingerprint=fingerprint,
        tokenizer_hash=vocabulary.tokenizer_hash,
        vocab_size=vocabulary.size,
        max_model_len=model.shape.max_model_len,
        end_token_ids=vocabulary.end_token_ids,
        numerics=numerics_fingerprint(
            fingerprint, model.dtype, info, versions, torch.backends.cpu.get_cpu_capability()
        ),
        batch_invariant=info.batch_invariant,
    )


def served_name(model: str) -> str:
    """The last part of the model's path or hub name."""
    return Path(model).name or Path(model).resolve().name


def _hello(limits: RunnerLimits, info: types_pb2.ModelInfo, num_host_blocks: int) -> worker_pb2.Hello:
    return worker_pb2.Hello(
        model=info,
        block_size=limits.rows.block_size,
        num_device_blocks=limits.rows.num_blocks,
        num_host_blocks=num_host_blocks,
        num_slots=limits.rows.num_slots,
        max_step_tokens=limits.max_step_tokens,
    )
