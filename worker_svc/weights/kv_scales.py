"""The scales that some checkpoints carry for an fp8 KV cache: what each layer's keys and values are divided by.

Knows where quantizers put them, in tensors of one number; reads nothing else.
"""

import logging
from collections.abc import Mapping

import torch

from octavo.sources.model_source import ModelSource
from worker_svc.weights.checkpoint import TensorSpec, WeightsError
from worker_svc.weights.safetensors_checkpoint import SafetensorsCheckpoint

Scales = tuple[tuple[float, float], ...]

# Below model.layers.N: for keys and values each, the first that is there; the last is one number for both.
_PLACES = ("self_attn", "self_attn.attn", "self_attn.qkv_proj")
_KEY_NAMES = (*(f"{place}.k_scale" for place in _PLACES), "self_attn.k_proj.k_scale", "self_attn.k_proj.output_scale")
_VALUE_NAMES = (*(f"{place}.v_scale" for place in _PLACES), "self_attn.v_proj.v_scale", "self_attn.v_proj.output_scale")
_SHARED_NAMES = ("self_attn.kv_scale",)

_log = logging.getLogger(__name__)


def read_kv_scales(source: ModelSource, num_layers: int) -> Scales | None:
    """(key scale, value scale) of each layer; None where the checkpoint has none.

    Raises WeightsError where only some layers have them, or one is not a positive number.
    """
    if source.is_gguf:
        return None
    checkpoint = SafetensorsCheckpoint.from_directory(source.weights)
    try:
        specs = checkpoint.specs()
        names = [_names(specs, layer) for layer in range(num_layers)]
        if all(pair is None for pair in names):
            return None
        scales = tuple(
            (_number(checkpoint, pair[0]), _number(checkpoint, pair[1])) if pair is not None else (0.0, 0.0)
            for pair in names
        )
    finally:
        checkpoint.close()
    if lacking := [layer for layer, pair in enumerate(names) if pair is None]:
        raise WeightsError(f"layers {lacking} have no scales of keys and values, the other layers have; use auto")
    _log.info("keys and values are stored under the checkpoint's scales, %g to %g", *_range(scales))
    return scales


def _names(specs: Mapping[str, TensorSpec], layer: int) -> tuple[str, str] | None:
    def first(names: tuple[str, ...]) -> str | None:
        return next((name for part in names if (name := f"model.layers.{layer}.{part}") in specs), None)

    shared = first(_SHARED_NAMES)
    key, value = first(_KEY_NAMES) or shared, first(_VALUE_NAMES) or shared
    return None if key is None or value is None else (key, value)


def _number(checkpoint: SafetensorsCheckpoint, name: str) -> float:
    tensor = checkpoint.load(name)
    number = float(tensor.float().flatten()[0]) if tensor.numel() == 1 else float("nan")
    if not 0 < number < float("inf"):
        raise WeightsError(f"tensor {name} of shape {tuple(tensor.shape)} must be one positive number")
    return number


def _range(scales: Scales) -> tuple[float, float]:
    numbers = torch.tensor(scales)
    return float(numbers.min()), float(numbers.max())
