"""Reads the header of a GGUF file: metadata and the table of tensors, never their data.

Every count and length is checked against the bytes that are left before anything is made from it, so a
truncated or hostile file costs an error and no memory. It knows the container, not architectures.
Format: the GGUF specification of the ggml project, versions 2 and 3, little-endian.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from octavo.sources.model_source import SourceError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_FIXED_HEADER_BYTES = 24
# The shortest possible entries: an empty name, its type and a one-byte value; an empty name, no
# dimensions, a type and an offset.
_MIN_KV_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8
_MAX_DIMENSIONS = 8
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


class GgufError(SourceError):
    """A GGUF header that cannot be read. `expected_bytes` is set where the file ends too early."""

    def __init__(self, path: Path, detail: str, expected_bytes: int | None = None) -> None:
        super().__init__(f"{path}: {detail}")
        self.path = path
        self.detail = detail
        self.expected_bytes = expected_bytes


@dataclass(frozen=True)
class GgufTensor:
    """One entry of the tensor table.

    `shape` has the slowest dimension first, as torch and safetensors write it. `type_id` is ggml's.
    `offset_bytes` counts from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Everything before the tensor data."""

    path: Path
    metadata: Mapping[str, object]
    tensors: tuple[GgufTensor, ...]
    file_bytes: int
    alignment_bytes: int

    @cached_property
    def by_name(self) -> Mapping[str, GgufTensor]:
        """The tensors by their names in the file."""
        return {tensor.name: tensor for tensor in self.tensors}

    @property
    def architecture(self) -> str:
        """`general.architecture`. Raises `GgufError` when the file has none."""
        return self.text("general.architecture")

    def text(self, key: str) -> str:
        """A string value that must be there."""
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise GgufError(self.path, f"metadata field {key} is {value!r}, expected a string")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer value; `default` where the field is absent, an error without one."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise GgufError(self.path, f"metadata field {key} is {_brief(value)}, expected one integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A float value; `default` where the field is absent, an error without one."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise GgufError(self.path, f"metadata field {key} is {_brief(value)}, expected one number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean value, `default` where the field is absent."""
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise GgufError(self.path, f"metadata field {key} is {_brief(value)}, expected a boolean")
        return value

    def flags(self, key: str) -> list[bool]:
        """An array of booleans that must be there."""
        value = self.metadata.get(key)
        if not isinstance(value, list) or not all(isinstance(item, bool) for item in value):
            raise GgufError(self.path, f"metadata field {key} is {_brief(value)}, expected booleans")
        return value

    def texts(self, key: str) -> list[str]:
        """An array of strings that must be there."""
        value = self.metadata.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise GgufError(self.path, f"metadata field {key} is {_brief(value)}, expected strings")
        return value


def read_gguf_header(path: Path) -> GgufHeader:
    """Read metadata and tensor table.

    Raises `GgufError` naming the file and, where it ends too early, the bytes needed and present.
    """
    file_bytes = path.stat().st_size
    with path.open("rb") as stream:
        if stream.read(4) != _MAGIC:
            raise GgufError(path, f"not a GGUF file: it does not begin with GGUF ({file_bytes:,} bytes)")
        if file_bytes < _FIXED_HEADER_BYTES:
            raise GgufError(path, _too_short(_FIXED_HEADER_BYTES, file_bytes), _FIXED_HEADER_BYTES)
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return _Cursor(path, view).header()


class _Cursor:
    """A position in the mapped file; each method reads one thing and moves past it."""

    def __init__(self, path: Path, view: mmap.mmap) -> None:
        self._path = path
        self._view = view
        self._size = len(view)
        self._at = len(_MAGIC)

    def header(self) -> GgufHeader:
        version = self._scalar("I")
        if version not in _VERSIONS:
            kind = "big-endian" if isinstance(version, int) and version & 0xFFFF == 0 else "not supported"
            raise GgufError(self._path, f"GGUF version {version} is {kind}; supported: {_VERSIONS}")
        num_tensors, num_fields = self._u64(), self._u64()
        self._require_room("metadata fields", num_fields, _MIN_KV_BYTES)
        self._require_room("tensors", num_tensors, _MIN_TENSOR_BYTES)
        metadata: dict[str, object] = {}
        for _ in range(num_fields):
            key = self._string()
            if key in metadata:
                raise GgufError(self._path, f"metadata field {key} appears twice")
            metadata[key] = self._value(self._scalar("I"), key)
        table = [self._tensor() for _ in range(num_tensors)]
        alignment = self._alignment(metadata)
        data_start = -(-self._at // alignment) * alignment
        tensors = tuple(
            GgufTensor(entry.name, entry.shape, entry.type_id, data_start + entry.offset_bytes) for entry in table
        )
        if len({tensor.name for tensor in tensors}) != len(tensors):
            raise GgufError(self._path, "two tensors have the same name")
        return GgufHeader(self._path, metadata, tensors, self._size, alignment)

    def _alignment(self, metadata: Mapping[str, object]) -> int:
        value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or value <= 0 or value & (value - 1) or value > 1 << 20:
            raise GgufError(self._path, f"general.alignment is {_brief(value)}, expected a power of two")
        return value

    def _tensor(self) -> GgufTensor:
        name = self._string()
        num_dimensions = self._scalar("I")
        if not isinstance(num_dimensions, int) or num_dimensions > _MAX_DIMENSIONS:
            raise GgufError(self._path, f"tensor {name!r} has {num_dimensions} dimensions, at most {_MAX_DIMENSIONS}")
        fastest_first = [self._u64() for _ in range(num_dimensions)]
        type_id = self._scalar("I")
        assert isinstance(type_id, int)
        return GgufTensor(name, tuple(reversed(fastest_first)), type_id, self._u64())

    def _value(self, type_id: object, key: str) -> object:
        if type_id == _STRING:
            return self._string()
        if type_id == _ARRAY:
            return self._array(key)
        if isinstance(type_id, int) and type_id in _SCALARS:
            return self._scalar(_SCALARS[type_id])
        raise GgufError(self._path, f"metadata field {key} has type {type_id}, which GGUF does not define")

    def _array(self, key: str) -> list[object]:
        item_type, num_items = self._scalar("I"), self._u64()
        if item_type == _STRING:
            self._require_room(f"items of {key}", num_items, 8)
            return self._strings(num_items)
        if not isinstance(item_type, int) or item_type not in _SCALARS:
            raise GgufError(self._path, f"metadata field {key} is an array of type {item_type}")
        item_format = _SCALARS[item_type]
        num_bytes = struct.calcsize(f"<{item_format}") * num_items
        start = self._take(num_bytes)
        return list(struct.unpack_from(f"<{num_items}{item_format}", self._view, start))

    def _strings(self, num_items: int) -> list[object]:
        """Many strings, as `_string` reads one: a vocabulary is most of the time that a header takes."""
        view, size, at = self._view, self._size, self._at
        unpack_length = struct.Struct("<Q").unpack_from
        texts: list[object] = []
        try:
            for _ in range(num_items):
                start = at + 8
                if start > size or (end := start + unpack_length(view, at)[0]) > size:
                    break
                texts.append(view[start:end].decode("utf-8"))
                at = end
        except UnicodeDecodeError:
            pass
        self._at = at
        # What stopped the loop is said by the one that reads a string with all its checks.
        while len(texts) < num_items:
            texts.append(self._string())
        return texts

    def _string(self) -> str:
        num_bytes = self._u64()
        start = self._take(num_bytes)
        try:
            return self._view[start : start + num_bytes].decode("utf-8")
        except UnicodeDecodeError as error:
            raise GgufError(self._path, f"string at byte {start:,} is not UTF-8: {error.reason}") from error

    def _u64(self) -> int:
        start = self._take(8)
        value: int = struct.unpack_from("<Q", self._view, start)[0]
        return value

    def _scalar(self, item_format: str) -> object:
        start = self._take(struct.calcsize(f"<{item_format}"))
        value: object = struct.unpack_from(f"<{item_format}", self._view, start)[0]
        return value

    def _take(self, num_bytes: int) -> int:
        start = self._at
        if num_bytes > self._size - start:
            raise GgufError(self._path, _too_short(start + num_bytes, self._size), start + num_bytes)
        self._at = start + num_bytes
        return start

    def _require_room(self, what: str, count: int, min_bytes_each: int) -> None:
        needed = self._at + count * min_bytes_each
        if needed > self._size:
            raise GgufError(self._path, f"claims {count:,} {what}: {_too_short(needed, self._size)}", needed)


def _too_short(needed: int, actual: int) -> str:
    return f"needs at least {needed:,} bytes, has {actual:,} (truncated or damaged)"


def _brief(value: object) -> str:
    if isinstance(value, list):
        return f"an array of {len(value):,}"
    return "absent" if value is None else repr(value)[:60]
