"""Collects what `octavo doctor` looks at beside what a start does: cores, shared memory, the cache, the tokenizer.

A start does without: nothing here stops one, or the worker says it itself. Reads files alone.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

from octavo.checks.types import DirectoryFacts, HostFacts, ModelFacts, TokenizerFacts
from octavo.machine import group_limits

_SHARED_MEMORY = "dev/shm"


def host_facts(root: Path = Path("/")) -> HostFacts:
    """Read the machine; `root` stands before /proc, /dev and /sys."""
    from octavo.sources.cache import cache_root

    shared = root / _SHARED_MEMORY
    return HostFacts(
        num_present_cpus=os.cpu_count() or 1,
        cpu_quota=group_limits(root).num_cpus,
        shared_memory=directory_facts(shared) if shared.is_dir() else None,
        cache=directory_facts(cache_root()),
    )


def directory_facts(path: Path) -> DirectoryFacts:
    """Room and rights of a directory, or of the nearest one above it that exists, where it would be made."""
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    return DirectoryFacts(
        path=str(path),
        is_writable=nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK),
        free_bytes=shutil.disk_usage(nearest).free,
    )


def with_tokenizer(model: ModelFacts) -> ModelFacts:
    """The model with what its tokenizer says, where the model could be read."""
    if model.directory is None or model.dtype is None:
        return model
    from octavo.sources import SourceError, vocabulary_facts

    directory = Path(model.directory)
    try:
        facts = vocabulary_facts(directory)
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        num_rows = int((config.get("text_config") or config)["vocab_size"])
    except (SourceError, OSError, ValueError, KeyError, TypeError) as error:
        return replace(model, tokenizer=TokenizerFacts(0, 0, 0, str(error)))
    return replace(model, tokenizer=TokenizerFacts(facts.num_tokens, facts.highest_token_id, num_rows, None))
