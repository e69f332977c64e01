"""Fingerprints: which model this is, and by which arithmetic it answers.

Two replicas with the same model fingerprint may share prefix-cache keys; two with the same numerics fingerprint give
bitwise the same answers where their kernels are batch-invariant. Reads files; must not know how they are loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from kernels.api import BackendInfo
from octavo.sources import ModelSource
from octavo.sources.cache import cache_root, file_sha256

_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 4096
# Fields of config.json that say who wrote it, not what the model computes.
_INCIDENTAL_FIELDS = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})


def model_fingerprint(source: ModelSource, weight_files: Iterable[Path], served_length: int | None = None) -> str:
    """Hex digest of architecture and weights, in well under a second however large they are.

    A GGUF file counts with its SHA-256, which the cache remembers. Of safetensors files the header (names, shapes,
    offsets), the size, and 64 evenly spaced pages of content: fine-tunes and conversions of one model differ
    almost everywhere, so they differ there. It is no proof against somebody who edits single weights on purpose.
    `served_length` is the longest sequence, for models whose keys depend on it.
    """
    config = json.loads((source.directory / "config.json").read_text(encoding="utf-8"))
    kept = {name: value for name, value in config.items() if name not in _INCIDENTAL_FIELDS}
    if served_length is not None:
        kept["served_length"] = served_length
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    if source.is_gguf:
        digest.update(file_sha256(source.weights, cache_root()).encode())
    else:
        for path in sorted(weight_files):
            digest.update(_sampled(path))
    return digest.hexdigest()[:32]


def numerics_fingerprint(
    model: str,
    dtype: str,
    backend: BackendInfo,
    versions: Mapping[str, str],
    cpu_capability: str,
    num_ranks: int = 1,
) -> str:
    """Hex digest of everything that decides the bits of an answer; `num_ranks` hold the model together."""
    facts = {
        "model": model,
        "dtype": dtype,
        "kernels": backend.name,
        "variant": backend.variant,
        "versions": dict(versions),
        "cpu": cpu_capability,
        "tensor_parallel_size": num_ranks,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _sampled(path: Path) -> bytes:
    num_bytes = path.stat().st_size
    digest = hashlib.sha256(f"{path.name}\0{num_bytes}\0".encode())
    with path.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        digest.update(stream.read(min(header_bytes, num_bytes)))
        for index in range(_SAMPLES_PER_FILE):
            stream.seek(index * max(0, num_bytes - _SAMPLE_BYTES) // max(1, _SAMPLES_PER_FILE - 1))
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.digest()
