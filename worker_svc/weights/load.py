"""Opens a model's checkpoint and gives the model exactly the tensors it asks for.

Every tensor is accounted for before one is read. It knows what a model expects only as names and shapes.
"""

import json
import logging
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from kernels.quantized import QuantizedWeight
from octavo.sources.model_source import ModelSource, SourceError
from octavo.sources.quantization_config import QuantizationConfig, parse_quantization
from worker_svc.weights.checkpoint import Checkpoint, ExpectedTensor, TensorSpec, WeightsError
from worker_svc.weights.gguf_cache import gguf_weights_file
from worker_svc.weights.quantized_checkpoint import QuantizedCheckpoint
from worker_svc.weights.safetensors_checkpoint import SafetensorsCheckpoint

# Buffers that older exporters saved along, which the model computes; scales of an fp8 KV cache, which kv_scales.py
# reads, and of queries and weights of attention, which are not quantized here.
_KV_SCALES = ("*.k_scale", "*.v_scale", "*.kv_scale", "*_proj.output_scale")
_IGNORED = ("*rotary_emb.inv_freq", *_KV_SCALES, "*self_attn*.q_scale", "*self_attn*.prob_scale")
_TIED_HEAD = "lm_head.weight"
_STORED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_log = logging.getLogger(__name__)


def open_checkpoint(source: ModelSource, dtype: torch.dtype, *, cache_dir: Path | None = None) -> Checkpoint:
    """Open a model's weights. `dtype` is what a GGUF file is converted to; safetensors stay as they are, or become
    float matrices where config.json has a quantization_config.

    `cache_dir` is the one given to `resolve`. Raises `WeightsError` naming the file at fault.
    """
    try:
        if source.is_gguf:
            return SafetensorsCheckpoint.from_file(gguf_weights_file(source.weights, dtype, cache_dir))
        stored = SafetensorsCheckpoint.from_directory(source.weights)
        quantization = _quantization(source)
        return stored if quantization is None else QuantizedCheckpoint(stored, quantization)
    except SourceError as error:
        raise WeightsError(str(error)) from error


def _quantization(source: ModelSource) -> QuantizationConfig | None:
    path = source.directory / "config.json"
    if not path.is_file():
        return None
    return parse_quantization(json.loads(path.read_text(encoding="utf-8")))


class Weights:
    """The tensors that a model expects of a checkpoint. Each is read, cut and converted when it is taken, and not kept:
    whoever packs it and lets it go holds one matrix twice, not a model.
    """

    def __init__(self, expected: Mapping[str, ExpectedTensor], checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        """Raises one `WeightsError` that lists every missing, unexpected and misshapen tensor; reads none.

        A head that the model ties to its embedding, and rotary buffers, may be there and are not read.
        """
        _require_match(expected, checkpoint.specs())
        self._expected, self._checkpoint, self._dtype = expected, checkpoint, dtype
        stored_dtypes = Counter(checkpoint.specs()[name].dtype for name in expected)
        for stored, num_tensors in stored_dtypes.items():
            if stored is not dtype:
                _log.info("%d of %d tensors are converted from %s to %s", num_tensors, len(expected), stored, dtype)

    def take(self, name: str) -> torch.Tensor:
        """An expected tensor, or the part of it that is expected; a view of the mapped file where it is stored so.

        Raises WeightsError for a value that the dtype cannot hold.
        """
        stored, part = self._checkpoint.load(name), self._expected[name].part
        return _convert(name, stored if part is None else part.of(stored), self._dtype)

    def take_matrix(self, name: str) -> torch.Tensor | QuantizedWeight:
        """As `take`, and a quantized matrix as it is: codes and scales."""
        if not isinstance(self._checkpoint, QuantizedCheckpoint):
            return self.take(name)
        weight, part = self._checkpoint.load_quantized(name), self._expected[name].part
        if weight is None:
            return self.take(name)
        return weight if part is None else part.of_quantized(weight)


def _convert(name: str, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    converted = stored.to(dtype)
    narrows = dtype is torch.float16 and stored.dtype is not torch.float16
    if narrows and bool((converted.isinf() & stored.isfinite()).any()):
        raise WeightsError(
            f"tensor {name} holds {stored.abs().max().item():g}, more than float16 can; use --dtype bfloat16 or float32"
        )
    return converted


def _require_match(expected: Mapping[str, ExpectedTensor], specs: Mapping[str, TensorSpec]) -> None:
    missing = [f"  {name} {list(wanted.shape)}" for name, wanted in expected.items() if name not in specs]
    unexpected = [
        f"  {name} {list(spec.shape)} in {spec.file.name}"
        for name, spec in specs.items()
        if name not in expected and not _may_be_ignored(name)
    ]
    misshapen = [
        f"  {name}: the model needs {list(wanted.shape)}, {spec.file.name} has {list(spec.shape)}"
        for name, wanted in expected.items()
        if (spec := specs.get(name)) is not None and spec.shape != wanted.shape
    ]
    mistyped = [
        f"  {name}: {specs[name].dtype} in {specs[name].file.name}"
        for name in expected
        if name in specs and specs[name].dtype not in _STORED_DTYPES
    ]
    sections = {
        "missing from the checkpoint": missing,
        "unexpected in the checkpoint": unexpected,
        "of another shape": misshapen,
        "of a type that is not a plain float (config.json has no quantization_config that explains it)": mistyped,
    }
    faults = [f"{_counted(lines)} {what}:\n" + "\n".join(lines) for what, lines in sections.items() if lines]
    if faults:
        raise WeightsError("the weights do not fit the model that config.json describes:\n" + "\n".join(faults))


def _may_be_ignored(name: str) -> bool:
    return name == _TIED_HEAD or any(fnmatchcase(name, pattern) for pattern in _IGNORED)


def _counted(lines: list[str]) -> str:
    return "1 tensor" if len(lines) == 1 else f"{len(lines)} tensors"
