"""The cached safetensors file of a GGUF file's weights, made when it is not there.

The converter, and the gguf package with it, is imported only to convert: a start that finds the file maps
it and reads no GGUF. Conversions are never evicted: see octavo/sources/cache.py.
"""

import logging
from pathlib import Path

import torch

from octavo.sources.cache import publish
from octavo.sources.gguf_directory import gguf_cache_directory
from octavo.sources.model_source import SourceError
from octavo.sources.safetensors_header import read_safetensors_header
from worker_svc.weights.checkpoint import WeightsError

CONVERTER_VERSION = 1

SAFETENSORS_TYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}

_log = logging.getLogger(__name__)


def gguf_weights_file(path: Path, dtype: torch.dtype, cache_dir: Path | None = None) -> Path:
    """The safetensors file of this GGUF file's weights in `dtype`, converted unless it is cached.

    Raises `WeightsError` naming tensors or types that cannot be converted, values that `dtype` cannot
    hold, or the disk space that is missing.
    """
    if dtype not in SAFETENSORS_TYPES:
        raise WeightsError(f"GGUF weights convert to {', '.join(map(str, SAFETENSORS_TYPES))}, not {dtype}")
    label = str(dtype).removeprefix("torch.")
    target = gguf_cache_directory(path, cache_dir) / f"weights-v{CONVERTER_VERSION}-{label}.safetensors"
    return publish(target, lambda built: _convert(path, dtype, built), _is_whole)


def _convert(path: Path, dtype: torch.dtype, built: Path) -> None:
    from worker_svc.weights.gguf_conversion import convert_gguf_weights

    convert_gguf_weights(path, dtype, built, SAFETENSORS_TYPES[dtype])


def _is_whole(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        read_safetensors_header(path)
    except SourceError as error:
        _log.warning("converting again: %s", error)
        return False
    return True
