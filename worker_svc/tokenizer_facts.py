"""What a worker asks of a tokenizer, found once and then remembered by the contents of its files.

Loading a tokenizer takes longer than everything that is asked of it. Knows files; no weights.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from octavo.sources import end_token_ids, vocabulary_facts
from octavo.sources.cache import remember, remembered
from worker_svc.warm_up import PROBE_TEXT

_KIND = "tokenizers"
# Every file that says something of tokens or ends.
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "generation_config.json",
)


@dataclass(frozen=True)
class TokenizerFacts:
    """`end_token_ids` rise, and may lie beyond the highest id; `probe_token_ids` are those of the warm-up's text."""

    highest_token_id: int
    end_token_ids: tuple[int, ...]
    probe_token_ids: tuple[int, ...]


def tokenizer_facts(directory: Path, cache: Path) -> TokenizerFacts:
    """The facts of a model directory, from the cache if it has them. Raises SourceError as `octavo.sources` does."""
    key = _key(directory)
    if (known := _read(remembered(cache, _KIND, key))) is not None:
        return known
    found = TokenizerFacts(
        vocabulary_facts(directory).highest_token_id, tuple(sorted(end_token_ids(directory))), _probe_ids(directory)
    )
    remember(cache, _KIND, key, asdict(found))
    return found


def _probe_ids(directory: Path) -> tuple[int, ...]:
    from tokenizers import Tokenizer

    return tuple(Tokenizer.from_file(str(directory / "tokenizer.json")).encode(PROBE_TEXT).ids)


def _key(directory: Path) -> str:
    """All that the facts depend on: the files, the probe, and who reads them."""
    digest = hashlib.sha256(PROBE_TEXT.encode())
    for package in ("octavo", "tokenizers"):
        digest.update(f"\0{package} {importlib.metadata.version(package)}".encode())
    for name in _FILES:
        path = directory / name
        content = path.read_bytes() if path.is_file() else b""
        digest.update(f"\0{name} {path.is_file()} {len(content)}\0".encode() + content)
    return digest.hexdigest()


def _read(entry: dict[str, object] | None) -> TokenizerFacts | None:
    """An entry as facts; None where it is none."""
    if entry is None:
        return None
    highest = entry.get("highest_token_id")
    ends, probe = _ids(entry.get("end_token_ids")), _ids(entry.get("probe_token_ids"))
    if not isinstance(highest, int) or ends is None or probe is None:
        return None
    return TokenizerFacts(highest, ends, probe)


def _ids(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, Sequence) or not all(isinstance(each, int) for each in value):
        return None
    return tuple(value)
