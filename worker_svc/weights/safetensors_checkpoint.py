"""A checkpoint in safetensors files: one, or several with an index that says which tensor is where.

Tensors are views of the mapped file, so loading copies nothing until something writes or converts.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from octavo.sources.safetensors_header import StoredTensor, read_safetensors_header, safetensors_files
from worker_svc.weights.checkpoint import TensorSpec, WeightsError

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class SafetensorsCheckpoint:
    """Reads headers when made, and each tensor's data when asked for it."""

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        self._specs = MappingProxyType(dict(specs))
        self._open_files: dict[Path, Any] = {}

    @classmethod
    def from_directory(cls, directory: Path) -> "SafetensorsCheckpoint":
        """The model file of a directory, or the shards its index names.

        The index decides for each tensor: a copy of it in another shard is not looked at. Raises
        `SafetensorsError` naming a file that is absent, malformed or lacks what the index places there.
        """
        files = safetensors_files(directory)
        specs: dict[str, TensorSpec] = {}
        for file_name in files.names:
            path = directory / file_name
            if not path.is_file():
                raise WeightsError(f"{path}: the file is absent; download the model again, every file of it")
            header = read_safetensors_header(path)
            for name in files.tensors_in(file_name) or header:
                if name not in header:
                    raise WeightsError(f"{path}: the index places tensor {name} here and the file has none")
                specs[name] = _spec(name, header[name], path)
        return cls(specs)

    @classmethod
    def from_file(cls, path: Path) -> "SafetensorsCheckpoint":
        """All tensors of one file. Raises `SafetensorsError` when it is malformed."""
        header = read_safetensors_header(path)
        return cls({name: _spec(name, stored, path) for name, stored in header.items()})

    @property
    def quantization(self) -> None:
        return None

    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor it holds, without reading any."""
        return self._specs

    def load(self, name: str) -> torch.Tensor:
        """One tensor, as stored. Raises `WeightsError` for a name it does not hold."""
        if name not in self._specs:
            raise WeightsError(f"the checkpoint holds no tensor {name}")
        path = self._specs[name].file
        try:
            if path not in self._open_files:
                self._open_files[path] = safe_open(path, framework="pt", device="cpu")
            tensor: torch.Tensor = self._open_files[path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path}: tensor {name} cannot be read: {error}") from error
        return tensor

    def close(self) -> None:
        """Let go of the files."""
        self._open_files.clear()


def _spec(name: str, stored: StoredTensor, path: Path) -> TensorSpec:
    if stored.dtype not in _DTYPES:
        raise WeightsError(f"{path}: tensor {name} has type {stored.dtype}; supported: {', '.join(_DTYPES)}")
    return TensorSpec(stored.shape, _DTYPES[stored.dtype], path)
