"""Gives a GGUF file the metadata directory of a Hugging Face model, made once and kept in the cache.

The directory is named by the file's content and the converter's version, so a better converter or
another file never meets an old entry; old entries stay, nothing is evicted. Weights are not touched here.
"""

import json
from pathlib import Path

from octavo.sources.cache import cache_root, file_sha256, publish, remembered_sha256
from octavo.sources.gguf_config import generation_config, model_config
from octavo.sources.gguf_header import read_gguf_header
from octavo.sources.gguf_tokenizer import tokenizer_config, tokenizer_json

CONVERTER_VERSION = 2

_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def gguf_cache_directory(gguf: Path, cache_dir: Path | None = None) -> Path:
    """Where everything made from this file's content is kept."""
    root = cache_root(cache_dir)
    return _entry(root, file_sha256(gguf, root))


def cached_gguf_metadata(gguf: Path, cache_dir: Path | None = None) -> Path | None:
    """What `convert_gguf_metadata` made of this file before; None if it did not or the file has changed.

    The file is not read: it was whole when it was converted, and is remembered by size and time.
    """
    root = cache_root(cache_dir)
    digest = remembered_sha256(gguf, root)
    if digest is None or not _is_whole(target := _metadata(_entry(root, digest))):
        return None
    return target


def convert_gguf_metadata(gguf: Path, cache_dir: Path | None = None) -> Path:
    """The directory of config.json, tokenizer.json and their companions, converted if it is not cached.

    Raises `GgufError` for an architecture, tokenizer or field that has no translation.
    """
    target = _metadata(gguf_cache_directory(gguf, cache_dir))
    return publish(target, lambda built: _write_metadata(gguf, built), _is_whole)


def _entry(root: Path, digest: str) -> Path:
    return root / "gguf" / digest


def _metadata(entry: Path) -> Path:
    return entry / f"metadata-v{CONVERTER_VERSION}"


def _write_metadata(gguf: Path, directory: Path) -> None:
    header = read_gguf_header(gguf)
    directory.mkdir()
    for name, content in (
        ("config.json", model_config(header)),
        ("generation_config.json", generation_config(header)),
        ("tokenizer_config.json", tokenizer_config(header)),
    ):
        (directory / name).write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
    (directory / "tokenizer.json").write_text(tokenizer_json(header), encoding="utf-8")


def _is_whole(directory: Path) -> bool:
    return all((directory / name).is_file() and (directory / name).stat().st_size for name in _FILES)
