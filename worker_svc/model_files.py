"""What a model's files say before any weight is read: architecture, this rank's part, precision, vocabulary.

Knows files and options; no kernels and no device but for whether it is the CPU.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

import torch

from octavo.machine import collect_machine
from octavo.memory import ModelShape
from octavo.model_families import ModelConfigError
from octavo.precision import dtype_reason, resolve_dtype
from octavo.process import StartError
from octavo.sharding import ShardingError
from octavo.sources import ModelSource, resolve, tokenizer_hash
from octavo.sources.cache import cache_root
from worker_svc.config import WorkerConfig
from worker_svc.fingerprint import model_fingerprint
from worker_svc.kv_cache import model_shape, resolve_max_model_len
from worker_svc.model.families import parse_config
from worker_svc.model.sharding import ModelShard, shard_model
from worker_svc.parallel.group import Membership
from worker_svc.tokenizer_facts import tokenizer_facts
from worker_svc.weights import Checkpoint

_LOG = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class FoundModel:
    """What the model phase found: files, architecture, this rank's part and its shape, precision."""

    source: ModelSource
    shard: ModelShard
    shape: ModelShape
    dtype: str


@dataclass(frozen=True)
class Vocabulary:
    """What the tokenizer phase found; `size` counts the ids that may be sampled."""

    size: int
    end_token_ids: tuple[int, ...]
    tokenizer_hash: str
    probe_token_ids: tuple[int, ...]


def find_model(config: WorkerConfig, ranks: Membership, *, is_on_cpu: bool) -> FoundModel:
    """Finds the files and this rank's part. Raises StartError for a model or a precision that is not served."""
    source = resolve(config.model)
    path = source.directory / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        parsed = parse_config(fields)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise StartError(f"{path} cannot be read: {error}") from error
    except ModelConfigError as error:
        raise StartError(f"{path.parent}: {error}") from error
    cpu_flags = collect_machine().cpu_flags if is_on_cpu else None
    stored = None if source.is_gguf else fields.get("dtype") or fields.get("torch_dtype") or "float32"
    dtype = resolve_dtype(config.dtype, stored, cpu_flags)
    if dtype not in DTYPES:
        raise StartError(
            f"{path}: dtype {dtype} is not one that the worker computes in; choose --dtype from {', '.join(DTYPES)}"
        )
    shape = model_shape(parsed, resolve_max_model_len(config, parsed))
    _LOG.info(
        "model %s: %s, %d layers, %.0f M parameters",
        source.name,
        parsed.architecture,
        parsed.num_layers,
        shape.num_parameters / 1e6,
    )
    _LOG.info("option --dtype is %s: %s", dtype, dtype_reason(config.dtype, stored, cpu_flags))
    limit = "the model's own limit" if config.max_model_len is None else "as given"
    _LOG.info("option --max-model-len is %d: %s", shape.max_model_len, limit)
    rank, num_ranks = ranks.group.rank, ranks.group.size
    try:
        return FoundModel(source, shard_model(parsed, rank, num_ranks), shape.part(rank, num_ranks), dtype)
    except ShardingError as error:
        raise StartError(f"--tensor-parallel-size {num_ranks}: {error}") from error


def read_vocabulary(model: FoundModel) -> Vocabulary:
    """Raises StartError when the tokenizer knows ids for which the embedding has no row."""
    directory, num_rows = model.source.directory, model.shard.whole.num_embedding_rows
    facts = tokenizer_facts(directory, cache_root())
    if facts.highest_token_id >= num_rows:
        raise StartError(
            f"{directory / 'tokenizer.json'} has token id {facts.highest_token_id}, the embedding has {num_rows} rows "
            "(vocab_size): the tokenizer does not belong to these weights; use the model's own"
        )
    size = facts.highest_token_id + 1
    if beyond := [token_id for token_id in facts.end_token_ids if token_id >= size]:
        _LOG.warning("end ids %s are not in the tokenizer's vocabulary of %d and are never sampled", beyond, size)
    return Vocabulary(
        size=size,
        end_token_ids=tuple(token_id for token_id in facts.end_token_ids if token_id < size),
        tokenizer_hash=tokenizer_hash(directory),
        probe_token_ids=facts.probe_token_ids,
    )


def fingerprint_of(model: FoundModel, checkpoint: Checkpoint) -> str:
    """The model's fingerprint, by the files that the checkpoint consists of."""
    served_length = model.shape.max_model_len if model.shard.whole.depends_on_length else None
    return model_fingerprint(model.source, {spec.file for spec in checkpoint.specs().values()}, served_length)
