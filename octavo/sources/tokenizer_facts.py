"""Facts about a model's tokenizer and ends, read from its JSON files without loading a tokenizer."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from octavo.sources.model_source import SourceError

_HASHED_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class VocabularyFacts:
    """`num_tokens` counts distinct ids, added tokens included; ids may have gaps below the highest."""

    num_tokens: int
    highest_token_id: int


def tokenizer_hash(directory: Path) -> str:
    """Hex SHA-256 over tokenizer.json, tokenizer_config.json and chat_template.jinja, names included.

    Two directories with the same hash turn a conversation into the same token ids.
    """
    digest = hashlib.sha256()
    for name in _HASHED_FILES:
        path = directory / name
        content = path.read_bytes() if path.is_file() else b""
        digest.update(f"{name}\0{path.is_file()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def end_token_ids(directory: Path) -> frozenset[int]:
    """The union of the EOS ids of config.json, generation_config.json and the tokenizer.

    Raises `SourceError` for a value that is neither an id nor a list of ids, or an EOS token that the
    tokenizer does not have.
    """
    config = _read_object(directory / "config.json")
    nested = config.get("text_config")
    ids = {
        *_ids(directory / "config.json", config.get("eos_token_id")),
        *_ids(directory / "config.json", nested.get("eos_token_id") if isinstance(nested, dict) else None),
        *_ids(
            directory / "generation_config.json",
            _read_object(directory / "generation_config.json").get("eos_token_id"),
        ),
    }
    if (token := _eos_token(directory)) is not None:
        vocabulary = _vocabulary(directory)
        if token not in vocabulary:
            raise SourceError(f"{directory / 'tokenizer.json'} does not have the EOS token {token!r}")
        ids.add(vocabulary[token])
    return frozenset(ids)


def vocabulary_facts(directory: Path) -> VocabularyFacts:
    """How many tokens tokenizer.json has and the highest id, tokens added to the model's included."""
    ids = set(_vocabulary(directory).values())
    if not ids:
        raise SourceError(f"{directory / 'tokenizer.json'} has no tokens")
    return VocabularyFacts(num_tokens=len(ids), highest_token_id=max(ids))


def _eos_token(directory: Path) -> str | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _read_object(directory / name).get("eos_token")
        if isinstance(token, Mapping):
            token = token.get("content")
        if isinstance(token, str):
            return token
    return None


def _ids(path: Path, value: object) -> Iterator[int]:
    for token_id in value if isinstance(value, list) else [] if value is None else [value]:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise SourceError(f"{path}: eos_token_id is {value!r}, expected a token id or a list of them")
        yield token_id


def _vocabulary(directory: Path) -> dict[str, int]:
    """Token to id. A vocabulary is a table (BPE, WordPiece) or a list of [token, score] (Unigram)."""
    path = directory / "tokenizer.json"
    content = _read_object(path)
    model = content.get("model")
    table = model.get("vocab") if isinstance(model, dict) else None
    try:
        if isinstance(table, list):
            vocabulary = {entry[0]: token_id for token_id, entry in enumerate(table)}
        else:
            vocabulary = dict(table or {})
        added = content.get("added_tokens")
        vocabulary.update({entry["content"]: entry["id"] for entry in added} if isinstance(added, list) else {})
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise SourceError(f"{path}: its vocabulary cannot be read ({error!r})") from error
    return vocabulary


def _read_object(path: Path) -> dict[str, object]:
    """The JSON object in a file; empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise SourceError(f"{path}: holds a {type(content).__name__}, expected an object")
    return content
