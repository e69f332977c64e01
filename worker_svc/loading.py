"""From a config to a worker that can produce tokens: the phases of the start after the imports, in order.

model -> tokenizer -> device (on a GPU) -> weights -> kv -> warm-up. Each phase is a function of what the earlier ones
found. Knows memory; must not know whom the worker serves.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from kernels.api import Backend, KVCache, KVCacheSpec, QuantizedLinears
from kernels.quantized import QuantizedWeight
from octavo.internal.v1 import types_pb2, worker_pb2
from octavo.machine import usable_cpus
from octavo.phases import Phases
from octavo.process import StartError
from worker_svc.caches import CardSteps, allocate_cache, allocate_card_cache, allocate_host_cache
from worker_svc.config import WorkerConfig
from worker_svc.decode_graphs import graph_sizes
from worker_svc.device.memory import Meter
from worker_svc.device.probes import probe_all_reduce, prove_kernels
from worker_svc.device.workplace import OpenWorkplace, open_workplace
from worker_svc.fingerprint import numerics_fingerprint
from worker_svc.grammar import GrammarCompiler, load_grammar_vocabulary
from worker_svc.model.build import build_decoder
from worker_svc.model.decoder import Decoder
from worker_svc.model_files import DTYPES, FoundModel, Vocabulary, find_model, fingerprint_of, read_vocabulary
from worker_svc.parallel.agreement import require_same_numerics, require_same_options
from worker_svc.parallel.group import ALONE, Membership, TPGroup
from worker_svc.process_memory import return_freed_memory
from worker_svc.profiling import StepMemory, measure_steps
from worker_svc.rows import RowLimits
from worker_svc.runner import Runner, RunnerLimits, RunnerParts
from worker_svc.second_copies import CopyMaker
from worker_svc.threads import StepThreads, watched_threads
from worker_svc.warm_up import warm_up
from worker_svc.weights import Checkpoint, Weights, WeightsError, open_checkpoint
from worker_svc.weights.kv_scales import read_kv_scales

_LOG = logging.getLogger(__name__)

# What need not be there for the first requests waits so long, for they need the cores more.
_LEISURE_S = 2.0


@dataclass(frozen=True)
class LoadedWorker:
    """A worker that has produced a token, and what it says of itself; Hello's incarnation and name are not set."""

    runner: Runner
    hello: worker_pb2.Hello
    # None: their number is fixed.
    threads: StepThreads | None
    grammars: GrammarCompiler
    copies: CopyMaker

    def close(self) -> None:
        """Ends what works beside the steps."""
        self.grammars.close()
        self.copies.close()


def load(
    config: WorkerConfig, phases: Phases, ranks: Membership = ALONE, open_place: OpenWorkplace = open_workplace
) -> LoadedWorker:
    """Runs the phases, on every rank of the replica alike, at the place that is opened for it.

    Raises StartError, SourceError or MemoryError with a cause that the operator can mend.
    """
    num_cpus = max(1, usable_cpus() // ranks.num_local_ranks)
    place = open_place(config, ranks, num_cpus)
    device, torch_device, backend, meter = place.device, place.torch_device, place.backend, place.meter
    require_same_options(ranks.group, config)
    with phases.phase("model"):
        model = find_model(config, ranks, is_on_cpu=meter is None)
    with phases.phase("tokenizer"):
        vocabulary = read_vocabulary(model)
    threads = watched_threads(config.num_threads, num_cpus, _setter(backend)) if meter is None else None
    spec = _cache_spec(config, model, backend, torch_device)
    if meter is not None:
        with phases.phase("device"):
            dtype = DTYPES[model.dtype]
            prove_kernels(backend, spec, model.shard.config.num_heads, dtype, torch_device)
            if ranks.group.size > 1:
                probe_all_reduce(ranks.group, device)
    with phases.phase("weights", total=len(model.shard.expected())) as advance:
        decoder, fingerprint = _load_decoder(model, backend, ranks.group, advance, torch_device)
        return_freed_memory()
    info = _model_info(config, model, vocabulary, backend, fingerprint, ranks.group)
    info.name = config.served_model_name or served_name(config.model)
    with phases.phase("kv"):
        require_same_numerics(ranks.group, info)
        graph_rows = () if config.enforce_eager or meter is None else graph_sizes(config.max_num_seqs)

        def parts_over(cache: KVCache, host_cache: KVCache | None = None) -> RunnerParts:
            return RunnerParts(decoder, backend, cache, host_cache, ranks.group, device, graph_rows)

        if meter is None:
            cache = allocate_cache(config, model.shape, model.dtype, spec, backend, ranks)
        else:
            unsized = _limits(config, model, vocabulary, 0)
            steps = _measure_steps(meter, lambda spec: parts_over(backend.allocate_kv_cache(spec)), spec, unsized)
            card = CardSteps(meter, steps, backend)
            cache = allocate_card_cache(config, model.shape, model.dtype, spec, card, ranks)
        host_cache = allocate_host_cache(config, backend, cache, ranks)
    limits = _limits(config, model, vocabulary, cache.spec.num_blocks)
    # Only now, so that what it takes meanwhile does not decide how many blocks there are.
    grammars = _open_grammars(model, vocabulary)
    runner = Runner(parts_over(cache, host_cache), limits, grammars)
    with phases.phase("warm-up"):
        token_ns = _warm_up(runner, vocabulary)
        runner.capture_graphs()
    hello = _hello(limits, info, host_cache.spec.num_blocks if host_cache is not None else 0)
    if meter is None:  # on a card the first step compiles kernels, and says nothing of later ones
        hello.warm_up_token_ns = token_ns
    return LoadedWorker(runner, hello, threads, grammars, CopyMaker(backend, _LEISURE_S))


def _open_grammars(model: FoundModel, vocabulary: Vocabulary) -> GrammarCompiler:
    """It reads the vocabulary once the first requests had their chance of the cores."""
    directory, size, end_ids = model.source.directory, vocabulary.size, vocabulary.end_token_ids
    return GrammarCompiler(lambda: load_grammar_vocabulary(directory, size, end_ids), end_ids, _LEISURE_S)


def _limits(config: WorkerConfig, model: FoundModel, vocabulary: Vocabulary, num_blocks: int) -> RunnerLimits:
    return RunnerLimits(
        RowLimits(
            num_slots=config.max_num_seqs,
            max_model_len=model.shape.max_model_len,
            block_size=config.block_size,
            num_blocks=num_blocks,
            vocab_size=vocabulary.size,
        ),
        max_step_tokens=config.max_num_batched_tokens,
    )


def _measure_steps(
    meter: Meter, make_parts: Callable[[KVCacheSpec], RunnerParts], spec: KVCacheSpec, limits: RunnerLimits
) -> StepMemory:
    try:
        return measure_steps(meter, make_parts, spec, limits)
    except torch.OutOfMemoryError as error:
        raise StartError(
            f"the weights leave no room for one step of {limits.max_step_tokens} tokens: {error}; lower "
            "--max-num-batched-tokens or --max-num-seqs, free memory of the card, or divide the model with "
            "--tensor-parallel-size"
        ) from error


def _setter(backend: Backend) -> Callable[[int], None]:
    """Sets the number of threads and has them begin at once, so that whoever watches threads can find them."""

    def set_num_threads(num_threads: int) -> None:
        backend.set_num_threads(num_threads)
        torch.zeros(2**17)  # torch divides no less than 32,768 elements

    return set_num_threads


def _load_decoder(
    model: FoundModel, backend: Backend, group: TPGroup, advance: Callable[[int], None], place: torch.device
) -> tuple[Decoder, str]:
    """The decoder with its weights, and the model's fingerprint."""
    dtype = DTYPES[model.dtype]
    try:
        checkpoint = open_checkpoint(model.source, dtype)
        if checkpoint.quantization is not None:
            how = "as they are" if isinstance(backend, QuantizedLinears) else "dequantized: these kernels take floats"
            _LOG.info("the matrices are quantized, %s, and packed %s", checkpoint.quantization, how)
        try:
            packed = _pack_decoder(model, backend, group, checkpoint, advance, place)
            return packed, fingerprint_of(model, checkpoint)
        finally:
            checkpoint.close()
    except WeightsError as error:
        raise StartError(str(error)) from error


def _pack_decoder(
    model: FoundModel,
    backend: Backend,
    group: TPGroup,
    checkpoint: Checkpoint,
    advance: Callable[[int], None],
    place: torch.device,
) -> Decoder:
    """Tensor by tensor: each is read when the layer that it belongs to is packed, and let go of."""
    weights = Weights(model.shard.expected(), checkpoint, DTYPES[model.dtype])
    # None: shown on a terminal.
    is_hidden = None if group.rank == 0 else True
    with tqdm(total=len(model.shard.expected()), desc="weights", unit="tensor", disable=is_hidden, leave=False) as bar:
        num_taken = 0

        def count() -> None:
            nonlocal num_taken
            num_taken += 1
            bar.update(1)
            advance(num_taken)

        source = _PlacedWeights(weights, place, count)
        return build_decoder(model.shard, group, source, backend, model.shape.max_model_len, place)


@dataclass(frozen=True)
class _PlacedWeights:
    """Takes tensors to where they are computed with; codes and scales are moved by the kernels that pack them."""

    weights: Weights
    place: torch.device
    count: Callable[[], None]

    def take(self, name: str) -> Tensor:
        self.count()
        return self.weights.take(name).to(self.place)

    def take_matrix(self, name: str) -> Tensor | QuantizedWeight:
        self.count()
        taken = self.weights.take_matrix(name)
        return taken.to(self.place) if isinstance(taken, Tensor) else taken


def _cache_spec(config: WorkerConfig, model: FoundModel, backend: Backend, place: torch.device) -> KVCacheSpec:
    """The rank's cache, but for its size. Raises StartError for a precision that kernels or card cannot hold."""
    own = model.shard.config
    plain = KVCacheSpec(own.num_layers, 0, config.block_size, own.num_kv_heads, own.head_dim, DTYPES[model.dtype])
    if config.kv_cache_dtype == "auto":
        return plain
    if backend.info.name == "cpu":
        raise StartError(
            f"--kv-cache-dtype {config.kv_cache_dtype}: the cpu kernels keep keys and values as they compute them; use "
            "auto, or --kernels reference, which is slow"
        )
    if place.type == "cuda" and torch.cuda.get_device_capability(place) < (8, 9):
        raise StartError(
            f"--kv-cache-dtype {config.kv_cache_dtype}: {torch.cuda.get_device_name(place)} has no fp8, which began "
            "with compute capability 8.9; use auto"
        )
    try:
        scales = read_kv_scales(model.source, own.num_layers)
    except WeightsError as error:
        raise StartError(f"--kv-cache-dtype {config.kv_cache_dtype}: {error}") from error
    return replace(plain, dtype=torch.float8_e4m3fn, scales=scales)


def _warm_up(runner: Runner, vocabulary: Vocabulary) -> int:
    """Time of the first step for each of its tokens, in nanoseconds."""
    probe = warm_up(runner, vocabulary.probe_token_ids)
    if probe.is_suspicious:
        _LOG.warning("tokenizer and weights may not belong together: on plain English, %s", probe)
    else:
        _LOG.info("probe on plain English: %s", probe)
    return probe.token_ns


def _model_info(
    config: WorkerConfig, model: FoundModel, vocabulary: Vocabulary, backend: Backend, fingerprint: str, group: TPGroup
) -> types_pb2.ModelInfo:
    """All but the name."""
    info = backend.info
    notes = [] if info.batch_invariant else [info.invariance_note]
    if not group.is_batch_invariant:
        notes.append("the ranks' sums are added in an order that depends on the batch")
    if notes:
        _LOG.warning("answers may depend on what else runs: %s", "; ".join(notes))
    precision = model.dtype if config.kv_cache_dtype == "auto" else f"{model.dtype}, KV {config.kv_cache_dtype}"
    packages = ("octavo", "torch", "llguidance", *(("triton",) if info.name == "triton" else ()))
    versions = {name: importlib.metadata.version(name) for name in packages}
    kept = f", matrices kept in {info.kept_weights}" if info.kept_weights else ""
    _LOG.info("kernels %s (%s)%s, torch %s", info.name, info.variant, kept, versions["torch"])
    return types_pb2.ModelInfo(
        fingerprint=fingerprint,
        tokenizer_hash=vocabulary.tokenizer_hash,
        vocab_size=vocabulary.size,
        max_model_len=model.shape.max_model_len,
        end_token_ids=vocabulary.end_token_ids,
        numerics=numerics_fingerprint(
            fingerprint, precision, info, versions, torch.backends.cpu.get_cpu_capability(), group.size
        ),
        batch_invariant=not notes,
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
