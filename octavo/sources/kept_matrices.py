"""How many weights of a checkpoint stay quantized where a GPU's kernels multiply them, and what they take there.

Reads headers alone. Which forms the kernels take is theirs to say (kernels/triton/quantized_layout.py); the bytes here
are those of that layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from octavo.sources.model_source import ModelSource
from octavo.sources.quantization_config import QuantizationConfig
from octavo.sources.safetensors_header import StoredTensor, read_safetensors_header, safetensors_files

# Of a group's scale and zero point, which are said for each tile of inputs.
_GROUP_BYTES, _TILE_INPUTS = 5, 128
_SCALE_BYTES = 4


@dataclass(frozen=True)
class KeptMatrices:
    """Weights of the layers' matrices that stay quantized, and their bytes with scales."""

    num_weights: int = 0
    num_bytes: int = 0

    def __add__(self, other: KeptMatrices) -> KeptMatrices:
        return KeptMatrices(self.num_weights + other.num_weights, self.num_bytes + other.num_bytes)


def kept_matrices(source: ModelSource, config: QuantizationConfig) -> KeptMatrices:
    """Of a checkpoint in safetensors. Raises SafetensorsError for a file that is not what its header says."""
    tensors: dict[str, StoredTensor] = {}
    for file in safetensors_files(source.weights).names:
        tensors |= read_safetensors_header(source.weights / file)
    found = KeptMatrices()
    for name in tensors:
        # A head or an embedding is dequantized, wherever it is not one.
        if ".layers." in name:
            found += _kept(tensors, name, config)
    return found


def _kept(tensors: Mapping[str, StoredTensor], name: str, config: QuantizationConfig) -> KeptMatrices:
    module, _, kind = name.rpartition(".")
    tensor = tensors[name]

    def num_items(*kinds: str) -> int:
        found = (tensors.get(f"{module}.{each}") for each in kinds)
        return max((math.prod(each.shape) for each in found if each is not None), default=0)

    if kind in ("qweight", "weight_packed") and config.bits == 4:
        num_weights, num_groups = 8 * math.prod(tensor.shape), num_items("scales", "weight_scale")
        tiles = max(num_groups, num_weights // _TILE_INPUTS)
        return KeptMatrices(num_weights, num_weights // 2 + _GROUP_BYTES * tiles)
    if kind == "weight" and tensor.dtype in ("F8_E4M3", "I8"):
        num_scales = max(tensor.shape[0], num_items("weight_scale_inv", "weight_scale"))
        num_weights = math.prod(tensor.shape)
        return KeptMatrices(num_weights, num_weights + _SCALE_BYTES * num_scales)
    return KeptMatrices()
