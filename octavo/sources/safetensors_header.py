"""Reads safetensors headers and indexes with the standard library alone.

Every length and offset is checked against the file's size before it is used. It knows the container and
the naming of shards, not models. Format: https://github.com/huggingface/safetensors
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from octavo.sources.model_source import SourceError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

# The limit of the safetensors library; real headers have a few megabytes.
_MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
_ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_DOWNLOAD = "download the model again, every file of it"


class SafetensorsError(SourceError):
    """A checkpoint whose files do not fit together, or a file that is not what its header says."""

    def __init__(self, path: Path, detail: str, remedy: str = _DOWNLOAD, expected_bytes: int | None = None) -> None:
        super().__init__(f"{path}: {detail}; {remedy}")
        self.path = path
        self.detail = detail
        self.remedy = remedy
        self.expected_bytes = expected_bytes


@dataclass(frozen=True)
class StoredTensor:
    """One entry of a header. `dtype` is safetensors' word; offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin_bytes: int
    end_bytes: int


@dataclass(frozen=True)
class SafetensorsFiles:
    """Which file holds which tensor. `file_of` is empty for a lone file, which holds all it has."""

    names: tuple[str, ...]
    file_of: Mapping[str, str]

    @cached_property
    def _by_file(self) -> Mapping[str, frozenset[str]]:
        grouped: dict[str, set[str]] = {}
        for tensor, file in self.file_of.items():
            grouped.setdefault(file, set()).add(tensor)
        return {file: frozenset(tensors) for file, tensors in grouped.items()}

    def tensors_in(self, file: str) -> frozenset[str]:
        """The tensors the index places in `file`; none for a lone file."""
        return self._by_file.get(file, frozenset())


def safetensors_files(directory: Path) -> SafetensorsFiles:
    """The files of a checkpoint: those of the index where there is one, else the only one.

    Raises `SafetensorsError` when there is none or it is not clear which.
    """
    index = directory / INDEX_FILE
    if index.exists():
        file_of = _read_index(index)
        return SafetensorsFiles(tuple(sorted(set(file_of.values()))), file_of)
    present = sorted(path.name for path in directory.glob("*.safetensors"))
    if SINGLE_FILE in present or len(present) == 1:
        return SafetensorsFiles((SINGLE_FILE if SINGLE_FILE in present else present[0],), {})
    if present:
        raise SafetensorsError(
            index, f"the index is absent and {directory} has {len(present)} safetensors files", _DOWNLOAD
        )
    if others := sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern)):
        raise SafetensorsError(
            directory / SINGLE_FILE,
            f"the file is absent; {others[0]} would have to be unpickled, which runs code from it",
            "convert the checkpoint to safetensors",
        )
    raise SafetensorsError(directory / SINGLE_FILE, "the file is absent and there is no index", _DOWNLOAD)


def read_safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, checked: known types, sizes that fit shapes, no overlap, no gap, no surplus.

    Raises `SafetensorsError`, with `expected_bytes` where the file is too short.
    """
    file_bytes = path.stat().st_size
    with path.open("rb") as stream:
        if file_bytes < _LENGTH_BYTES:
            raise SafetensorsError(path, f"{file_bytes} bytes hold no header", expected_bytes=_LENGTH_BYTES)
        header_bytes = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        data_start = _LENGTH_BYTES + header_bytes
        if header_bytes > _MAX_HEADER_BYTES:
            raise SafetensorsError(
                path, f"claims a header of {header_bytes:,} bytes, at most {_MAX_HEADER_BYTES:,} are read"
            )
        if data_start > file_bytes:
            raise SafetensorsError(path, f"claims a header of {header_bytes:,} bytes", expected_bytes=data_start)
        text = stream.read(header_bytes)
    tensors = _parse_header(path, text)
    _require_tiling(path, tensors, data_start, file_bytes)
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        entries = list(weight_map.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SafetensorsError(index, f"has no readable weight_map ({error!r})") from error
    for tensor, file in entries:
        if not isinstance(file, str) or Path(file).name != file:
            raise SafetensorsError(index, f"places tensor {tensor} in {file!r}, which is not a file name")
    if not entries:
        raise SafetensorsError(index, "its weight_map is empty")
    return dict(entries)


def _parse_header(path: Path, text: bytes) -> dict[str, StoredTensor]:
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SafetensorsError(path, f"its header is not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise SafetensorsError(path, "its header is not a JSON object")
    return {name: _parse_entry(path, name, entry) for name, entry in entries.items() if name != "__metadata__"}


def _parse_entry(path: Path, name: str, entry: object) -> StoredTensor:
    try:
        assert isinstance(entry, dict)
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers_are_sound = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        num_bits = math.prod(shape) * _ITEM_BITS[dtype]
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise SafetensorsError(path, f"tensor {name!r} has a malformed entry: {error!r}") from error
    if not numbers_are_sound or num_bits % 8 or num_bits // 8 != end - begin:
        raise SafetensorsError(
            path,
            f"tensor {name!r} of shape {list(shape)} and type {dtype} needs {num_bits / 8:,.0f} bytes, "
            f"its offsets [{begin}, {end}] say otherwise",
        )
    return StoredTensor(dtype, shape, begin, end)


def _require_tiling(path: Path, tensors: Mapping[str, StoredTensor], data_start: int, file_bytes: int) -> None:
    """The tensors' ranges follow one another without overlap or gap, from the header to the file's end."""
    reached, before = 0, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin_bytes, item[1].end_bytes)):
        if tensor.begin_bytes != reached:
            what = "overlaps" if tensor.begin_bytes < reached else "leaves a gap after"
            raise SafetensorsError(
                path, f"tensor {name!r} at offset {tensor.begin_bytes:,} {what} {before}, which ends at {reached:,}"
            )
        reached, before = tensor.end_bytes, f"tensor {name!r}"
    if data_start + reached > file_bytes:
        raise SafetensorsError(path, "its tensors reach past the end", expected_bytes=data_start + reached)
    if data_start + reached < file_bytes:
        raise SafetensorsError(path, f"has {file_bytes:,} bytes, and its header describes {data_start + reached:,}")
