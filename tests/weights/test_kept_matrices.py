"""What is predicted of a quantized checkpoint from its headers, and what the GPU's kernels hold of it once packed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.memory import ModelShape, QuantizedPart
from octavo.sources import ModelSource, Origin
from octavo.sources.kept_matrices import kept_matrices
from octavo.sources.quantization_config import parse_quantization
from tests.fakes.tiny_llama import TinyLlama, tiny_config
from tests.weights.quantized_layouts import Written, awq, compressed, fp8, gptq
from worker_svc.weights import open_checkpoint
from worker_svc.weights.quantized_checkpoint import QuantizedCheckpoint

pytest.importorskip("triton", reason="Triton is not installed: nothing packs for a GPU")
ROWS, COLUMNS = 128, 384
BLOCK = (128, 128)
LAYOUTS: dict[str, tuple[Callable[[Tensor], Written], dict[str, Any]]] = {
    "awq": (lambda w: awq(w, 128), {"quant_method": "awq", "bits": 4, "group_size": 128}),
    "gptq, small groups": (lambda w: gptq(w, group_size=32), {"quant_method": "gptq", "bits": 4, "group_size": 32}),
    "gptq, one group": (lambda w: gptq(w, group_size=COLUMNS), {"quant_method": "gptq", "bits": 4}),
    "gptq 8 bits": (lambda w: gptq(w, bits=8, group_size=128), {"quant_method": "gptq", "bits": 8, "group_size": 128}),
    "fp8 blocks": (lambda w: fp8(w, BLOCK, "weight_scale_inv"), {"quant_method": "fp8", "weight_block_size": BLOCK}),
    "fp8 channels": (lambda w: fp8(w, (1, 999), "weight_scale"), compressed("float-quantized", 8)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_held_is_what_was_predicted(tmp_path: Path, layout: str) -> None:
    from kernels.triton.quantized_layout import QuantizedLinear, pack

    writer, config = LAYOUTS[layout]
    name = "model.layers.0.mlp.up_proj"
    written, matrix = writer(torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)))
    tensors = {f"{name}.{kind}": part for kind, part in written.items()} | {"model.norm.weight": torch.ones(8)}
    # A head that is quantized is dequantized when it is loaded.
    tensors |= {f"lm_head.{kind}": part.clone() for kind, part in written.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    source = ModelSource("tiny", Origin.DIRECTORY, tmp_path, tmp_path)
    quantization = parse_quantization({"quantization_config": config})
    assert quantization is not None
    predicted = kept_matrices(source, quantization)

    checkpoint = open_checkpoint(source, torch.bfloat16)
    assert isinstance(checkpoint, QuantizedCheckpoint)
    weight = checkpoint.load_quantized(f"{name}.weight")
    assert weight is not None
    packed = pack(weight, None, torch.bfloat16, torch.device("cpu"))
    if not isinstance(packed, QuantizedLinear):
        assert predicted.num_weights == 0
        return
    values = [getattr(packed, field.name) for field in fields(packed)]
    held = sum(value.nbytes for value in values if isinstance(value, Tensor))
    assert predicted.num_weights == matrix.numel()
    # Scales of blocks are few, and are counted as those of rows, which they become where projections are stacked.
    assert held <= predicted.num_bytes <= held * 1.01 + 4 * ROWS


def test_a_models_weights_are_predicted_as_they_are_held() -> None:
    shape = ModelShape.from_config(tiny_config(TinyLlama()))
    for whole in (shape, shape.part(0, 2)):
        four_bits = replace(whole, quantized=QuantizedPart(0.5, 0.5625))
        saved = whole.num_matrix_weights * 0.5 * (2 - 0.5625)
        assert whole.weight_bytes("bfloat16") - four_bits.weight_bytes("bfloat16") == int(saved)
        # 32-bit activations multiply dequantized matrices.
        assert four_bits.weight_bytes("float32") == whole.weight_bytes("float32")
