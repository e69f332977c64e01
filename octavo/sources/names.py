"""Turns the name a user types into files on this machine.

It knows which form a name has and which room handles it; it reads no file's content itself.
"""

import re
from pathlib import Path

from octavo.sources.default_model import DEFAULT_MODEL, fetch_default_model
from octavo.sources.gguf_directory import cached_gguf_metadata, convert_gguf_metadata
from octavo.sources.hub import fetch_from_hub
from octavo.sources.integrity import inspect_gguf
from octavo.sources.model_source import ModelSource, Origin, SourceError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve(name: str, *, cache_dir: Path | None = None) -> ModelSource:
    """Find a model's files, fetching and converting what is not here yet.

    `name` is "default" or the default model's name, the path of a Hugging Face directory or of a .gguf
    file, or a hub name "organisation/model". An existing path wins over a hub name. `cache_dir`
    overrides the cache ($OCTAVO_CACHE, $XDG_CACHE_HOME/octavo or ~/.cache/octavo).

    Raises `SourceError` saying what was looked for and what to do.
    """
    if name in ("default", DEFAULT_MODEL):
        gguf = fetch_default_model(cache_dir)
        return _from_gguf(DEFAULT_MODEL, Origin.DEFAULT, gguf, cache_dir)
    path = _as_path(name)
    if name and path.exists():
        return _from_path(name, path.absolute(), cache_dir)
    if _HUB_NAME.fullmatch(name) and path.suffix != ".gguf":
        return _from_directory(name, Origin.HUB, fetch_from_hub(name), cache_dir)
    raise SourceError(
        f"model {name!r} does not exist: no file or directory at {path.absolute()}; expected a Hugging Face "
        f"directory, a .gguf file, a hub name (organisation/model) or {DEFAULT_MODEL!r}"
    )


def _as_path(name: str) -> Path:
    """The name as a path that can be asked whether it exists."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise SourceError(f"model {name[:100]!r} can be neither a path nor a hub name: {error}") from error
    return path


def _from_path(name: str, path: Path, cache_dir: Path | None) -> ModelSource:
    if path.is_dir():
        return _from_directory(name, Origin.DIRECTORY, path, cache_dir)
    if path.suffix == ".gguf":
        return _from_gguf(name, Origin.GGUF, path, cache_dir)
    raise SourceError(f"model {name!r} is a file that does not end in .gguf; expected a directory or a .gguf")


def _from_directory(name: str, origin: Origin, directory: Path, cache_dir: Path | None) -> ModelSource:
    if (directory / "config.json").exists():
        return ModelSource(name, origin, directory, directory)
    ggufs = sorted(directory.glob("*.gguf"))
    if len(ggufs) == 1:
        return _from_gguf(name, origin, ggufs[0], cache_dir)
    if ggufs:
        raise SourceError(
            f"{directory} has no config.json and {len(ggufs)} .gguf files; name one of them: "
            f"{', '.join(gguf.name for gguf in ggufs)}"
        )
    raise SourceError(f"{directory} has no config.json and no .gguf file: not a model directory")


def _from_gguf(name: str, origin: Origin, gguf: Path, cache_dir: Path | None) -> ModelSource:
    if (converted := cached_gguf_metadata(gguf, cache_dir)) is not None:
        return ModelSource(name, origin, converted, gguf)
    # Looked at before it is hashed: reading a large file only to find it cut short takes minutes.
    if problems := inspect_gguf(gguf):
        raise SourceError("; ".join(str(problem) for problem in problems))
    return ModelSource(name, origin, convert_gguf_metadata(gguf, cache_dir), gguf)
