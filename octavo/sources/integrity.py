"""Pure facts about a model's files, found before anything is loaded from them.

Reads headers and sizes only: seconds at most on any disk, no large allocation, no mapped data. It says
what is wrong with which file; whether that stops a start is the caller's business.
"""

import enum
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.sources.ggml_types import BLOCK_SIZES
from octavo.sources.gguf_header import GgufError, GgufHeader, GgufTensor, read_gguf_header
from octavo.sources.model_source import ModelSource
from octavo.sources.safetensors_header import (
    SafetensorsError,
    read_safetensors_header,
    safetensors_files,
)

_LFS_MARK = b"version https://git-lfs.github.com/spec/"
_LFS_SIZE = re.compile(rb"^size (\d+)$", re.MULTILINE)
_MAX_CONFIG_BYTES = 16 << 20
_MAX_LISTED = 5


class ProblemKind(enum.Enum):
    """What is wrong with a file."""

    ABSENT = "absent"
    EMPTY = "empty"
    UNREADABLE = "unreadable"
    LFS_POINTER = "git-lfs-pointer"
    TRUNCATED = "truncated"
    MALFORMED = "malformed"


@dataclass(frozen=True)
class FileProblem:
    """One thing wrong with one file. Byte counts are None where size is not the matter."""

    kind: ProblemKind
    path: Path
    detail: str
    remedy: str
    expected_bytes: int | None = None
    actual_bytes: int | None = None

    def __str__(self) -> str:
        return f"{self.path}: {self.detail}; {self.remedy}"


def inspect_files(source: ModelSource) -> tuple[FileProblem, ...]:
    """Everything wrong with a model's files, metadata first; empty when they are sound."""
    problems = [
        *_inspect_json(source.directory / "config.json", is_required=True),
        *_inspect_json(source.directory / "generation_config.json", is_required=False),
        *_inspect_json(source.directory / "tokenizer_config.json", is_required=False),
        *_inspect_tokenizer(source.directory / "tokenizer.json"),
    ]
    weights = inspect_gguf(source.weights) if source.is_gguf else inspect_safetensors(source.weights)
    return (*problems, *weights)


def inspect_gguf(path: Path) -> tuple[FileProblem, ...]:
    """Header, counts and the place of every tensor's data against the file's size."""
    if found := _inspect_outside(path):
        return (found,)
    try:
        header = read_gguf_header(path)
    except GgufError as error:
        return (_from_error(path, error.detail, error.expected_bytes),)
    ends = [(_tensor_end(header, tensor), tensor) for tensor in header.tensors]
    for end, tensor in ends:
        if isinstance(end, str):
            return (_malformed(path, f"tensor {tensor.name}: {end}"),)
    last = max((end for end, _ in ends if isinstance(end, int)), default=0)
    if last > header.file_bytes:
        cut = sum(1 for end, _ in ends if isinstance(end, int) and end > header.file_bytes)
        return (_truncated(path, last, f"{cut} of {len(ends)} tensors reach past the end"),)
    return ()


def inspect_safetensors(directory: Path) -> tuple[FileProblem, ...]:
    """Each file the index (or the lone model file) names: present, whole, and holding what it should."""
    index = directory / "model.safetensors.index.json"
    if index.exists() and (problems := list(_inspect_json(index, is_required=True))):
        return tuple(problems)
    try:
        files = safetensors_files(directory)
    except SafetensorsError as error:
        return (FileProblem(ProblemKind.ABSENT, error.path, error.detail, error.remedy),)
    return tuple(
        problem for name in files.names for problem in _inspect_shard(directory / name, files.tensors_in(name))
    )


def _inspect_shard(path: Path, indexed: frozenset[str]) -> Iterator[FileProblem]:
    if found := _inspect_outside(path):
        yield found
        return
    try:
        header = read_safetensors_header(path)
    except SafetensorsError as error:
        yield _from_error(path, error.detail, error.expected_bytes)
        return
    if absent := sorted(indexed - header.keys()):
        yield _malformed(path, f"the index places {_listed(absent)} here, and the file has no such tensor")


def _inspect_outside(path: Path) -> FileProblem | None:
    """What can be said of any file from its first bytes and its size."""
    if not path.is_file():
        return FileProblem(ProblemKind.ABSENT, path, "the file is absent", _REMEDIES[ProblemKind.ABSENT])
    actual = path.stat().st_size
    if actual == 0:
        return FileProblem(
            ProblemKind.EMPTY, path, "the file has 0 bytes", _REMEDIES[ProblemKind.EMPTY], actual_bytes=0
        )
    try:
        with path.open("rb") as stream:
            start = stream.read(1024)
    except OSError as error:
        kind = ProblemKind.UNREADABLE
        return FileProblem(kind, path, f"the file cannot be read: {error.strerror}", _REMEDIES[kind])
    if not start.startswith(_LFS_MARK):
        return None
    size = _LFS_SIZE.search(start)
    expected = int(size.group(1)) if size else None
    stands_for = "a file" if expected is None else f"a file of {expected:,} bytes"
    detail = f"a Git-LFS pointer of {actual:,} bytes that stands for {stands_for}"
    return FileProblem(ProblemKind.LFS_POINTER, path, detail, _REMEDIES[ProblemKind.LFS_POINTER], expected, actual)


def _inspect_json(path: Path, *, is_required: bool) -> Iterator[FileProblem]:
    if not is_required and not path.exists():
        return
    if found := _inspect_outside(path):
        yield found
        return
    if path.stat().st_size > _MAX_CONFIG_BYTES and path.suffixes[-2:] != [".index", ".json"]:
        yield _malformed(path, f"{path.stat().st_size:,} bytes, at most {_MAX_CONFIG_BYTES:,} are read")
        return
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        yield _malformed(path, f"not JSON: {error}")
        return
    if not isinstance(content, dict):
        yield _malformed(path, f"holds a {type(content).__name__}, expected an object")


def _inspect_tokenizer(path: Path) -> Iterator[FileProblem]:
    """Tokenizers are large and are parsed when they are loaded; here only both ends are looked at."""
    if found := _inspect_outside(path):
        yield found
        return
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - 64))
        end = stream.read().rstrip()
        stream.seek(0)
        start = stream.read(64).lstrip()
    if not start.startswith(b"{"):
        yield _malformed(path, "does not begin with {, so it is not a tokenizer.json")
    elif not end.endswith(b"}"):
        yield _malformed(path, f"does not end with }} at byte {path.stat().st_size:,}, so it was cut short")


def _tensor_end(header: GgufHeader, tensor: GgufTensor) -> int | str:
    """The byte after a tensor's data, or what is wrong with its entry."""
    if tensor.type_id not in BLOCK_SIZES:
        return f"its type {tensor.type_id} is not a known type of ggml's"
    block_items, block_bytes = BLOCK_SIZES[tensor.type_id]
    if tensor.offset_bytes % header.alignment_bytes:
        return f"its data at byte {tensor.offset_bytes:,} is not aligned to {header.alignment_bytes}"
    num_items = 1
    for length in tensor.shape:
        num_items *= length
    if num_items == 0 or tensor.shape[-1] % block_items:
        return f"its shape {tensor.shape} is not made of whole blocks of {block_items}"
    return tensor.offset_bytes + num_items // block_items * block_bytes


def _from_error(path: Path, detail: str, expected_bytes: int | None) -> FileProblem:
    if expected_bytes is None:
        return _malformed(path, detail)
    return _truncated(path, expected_bytes, detail)


def _truncated(path: Path, expected: int, detail: str) -> FileProblem:
    actual = path.stat().st_size
    text = f"truncated: expected {expected:,} bytes or more, has {actual:,} ({detail})"
    return FileProblem(ProblemKind.TRUNCATED, path, text, _REMEDIES[ProblemKind.TRUNCATED], expected, actual)


def _malformed(path: Path, detail: str) -> FileProblem:
    return FileProblem(
        ProblemKind.MALFORMED, path, detail, _REMEDIES[ProblemKind.MALFORMED], actual_bytes=path.stat().st_size
    )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_LISTED])
    return shown if len(names) <= _MAX_LISTED else f"{shown} and {len(names) - _MAX_LISTED} more"


_REMEDIES = {
    ProblemKind.ABSENT: "download the model again, every file of it",
    ProblemKind.EMPTY: "download the file again",
    ProblemKind.UNREADABLE: "let the user that serves read it (chmod, chown)",
    ProblemKind.LFS_POINTER: "run `git lfs pull` in the model's repository, or download the file itself",
    ProblemKind.TRUNCATED: "download the file again; the disk may have been full",
    ProblemKind.MALFORMED: "download the file again, or export the model again",
}
