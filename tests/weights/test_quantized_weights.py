"""Quantized checkpoints against the matrices they stand for: each layout, cut and stacked too, and refused ones."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.quantized import GroupedWeight, stack
from kernels.reference.quantized import dequantize, quantize_grouped, quantize_scaled
from octavo.sources import ModelSource, Origin, SourceError
from octavo.sources.quantization_config import parse_quantization
from tests.weights import tiny_checkpoints
from tests.weights.quantized_layouts import GROUP, LAYOUTS, awq, compressed, quantized
from worker_svc.weights import ExpectedTensor, Part, Weights, WeightsError, open_checkpoint
from worker_svc.weights.quantized_checkpoint import QuantizedCheckpoint


def write(directory: Path, layout: str) -> tuple[ModelSource, dict[str, Tensor]]:
    """A tiny Llama whose projections are quantized, and what each of its tensors stands for."""
    tensors, matrices = quantized(tiny_checkpoints.random_weights(), layout)
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(())
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"quantization_config": LAYOUTS[layout][1]}))
    return ModelSource("tiny", Origin.DIRECTORY, directory, directory), matrices


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loads_the_matrices_that_the_layout_stands_for(tmp_path: Path, layout: str) -> None:
    source, matrices = write(tmp_path, layout)
    for dtype in (torch.float32, torch.bfloat16):
        checkpoint = open_checkpoint(source, dtype)
        loaded = tiny_checkpoints.load_all(checkpoint, dtype)
        checkpoint.close()
        assert list(loaded) == list(tiny_checkpoints.shapes())
        for name, matrix in matrices.items():
            assert torch.equal(loaded[name], matrix.to(dtype)), name


def test_gives_codes_and_scales_to_kernels_that_multiply_them(tmp_path: Path) -> None:
    source, matrices = write(tmp_path, "gptq desc_act")
    checkpoint = open_checkpoint(source, torch.float32)
    assert isinstance(checkpoint, QuantizedCheckpoint)
    name = "model.layers.1.mlp.down_proj.weight"
    weight = checkpoint.load_quantized(name)
    assert isinstance(weight, GroupedWeight)
    assert weight.bits == 4
    assert torch.equal(dequantize(weight), matrices[name])
    assert checkpoint.load_quantized("model.norm.weight") is None


def test_a_missing_companion_is_named(tmp_path: Path) -> None:
    source, _ = write(tmp_path, "awq")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.mlp.up_proj.scales"]
    save_file(tensors, path)
    with pytest.raises(WeightsError, match=r"mlp\.up_proj has no tensor .*up_proj\.scales"):
        tiny_checkpoints.load_all(open_checkpoint(source, torch.float32), torch.float32)


@pytest.mark.parametrize("layout", ["awq", "gptq"])
def test_f60_groups_that_are_not_those_of_the_config_are_refused_with_sizes(tmp_path: Path, layout: str) -> None:
    source, _ = write(tmp_path, layout)
    config = json.loads((tmp_path / "config.json").read_text())
    for group_size, refused in ((GROUP, False), (-1, False), (2 * GROUP, True), (GROUP // 2, True)):
        config["quantization_config"]["group_size"] = group_size
        (tmp_path / "config.json").write_text(json.dumps(config))
        checkpoint = open_checkpoint(source, torch.float32)
        if not refused:
            tiny_checkpoints.load_all(checkpoint, torch.float32)
            continue
        words = rf"proj cannot be read: .* 4 groups of group_size {group_size}, which do not divide its 64 inputs"
        with pytest.raises(WeightsError, match=words):
            tiny_checkpoints.load_all(checkpoint, torch.float32)


def test_f60_a_last_group_cut_short_is_read_where_its_size_is_said(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj"
    config = {"quant_method": "awq", "bits": 4, "group_size": 64}
    tensors, whole = awq(torch.randn(8, 128, generator=torch.Generator().manual_seed(1)), 64)
    cut = {f"{name}.{kind}": part[:96] if kind == "qweight" else part for kind, part in tensors.items()}
    save_file({each: part.contiguous() for each, part in cut.items()}, tmp_path / "model.safetensors")
    source = ModelSource("tiny", Origin.DIRECTORY, tmp_path, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    assert torch.equal(open_checkpoint(source, torch.float32).load(f"{name}.weight"), whole[:, :96])
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {**config, "group_size": 128}}))
    with pytest.raises(WeightsError, match=r"2 groups of group_size 128, which do not divide its 96 inputs"):
        open_checkpoint(source, torch.float32).load(f"{name}.weight")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "part",
    [
        Part(0, (range(8, 40),)),
        Part(0, (range(32), range(64, 96))),
        Part(1, (range(48, 96),)),
        Part(1, (range(8, 37),)),
    ],
    ids=["rows", "ranges of rows", "columns", "odd columns"],
)
def test_a_part_stands_for_the_same_part_of_the_matrix(tmp_path: Path, layout: str, part: Part) -> None:
    source, matrices = write(tmp_path, layout)
    name = f"model.layers.0.mlp.{'down' if part.dim else 'up'}_proj.weight"
    shapes = tiny_checkpoints.shapes()
    expected = {each: ExpectedTensor(shape, part if each == name else None) for each, shape in shapes.items()}
    weights = Weights(expected, open_checkpoint(source, torch.float32), torch.float32)
    weight = weights.take_matrix(name)
    assert not isinstance(weight, Tensor)
    assert torch.equal(dequantize(weight), part.of(matrices[name]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stacked_matrices_stand_for_the_matrices_stacked(tmp_path: Path, layout: str) -> None:
    source, matrices = write(tmp_path, layout)
    checkpoint = open_checkpoint(source, torch.float32)
    assert isinstance(checkpoint, QuantizedCheckpoint)
    for module, projections in (("self_attn", ("q", "k", "v")), ("mlp", ("gate", "up"))):
        names = [f"model.layers.1.{module}.{projection}_proj.weight" for projection in projections]
        parts = [weight for name in names if (weight := checkpoint.load_quantized(name)) is not None]
        stacked = stack(parts)
        assert stacked is not None
        assert torch.equal(dequantize(stacked), torch.cat([matrices[name] for name in names]))


def test_matrices_of_different_kinds_are_not_stacked() -> None:
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    four_bits, fp8 = quantize_grouped(weight, 16), quantize_scaled(weight, (32, 32))
    assert stack([four_bits, fp8]) is None
    assert stack([four_bits, quantize_grouped(weight, 32)]) is None
    assert stack([fp8, quantize_scaled(weight, (32, 64))]) is None


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version gemv"),
        ({"quant_method": "gptq", "bits": 3}, "gptq of 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size 0"),
        ({"quant_method": "awq", "bits": 4, "q_group_size": "all"}, "group_size 'all'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 of format e5m2"),
        (compressed("nvfp4-pack-quantized", 4), "format nvfp4-pack-quantized"),
        ({"bits": 4}, "without quant_method"),
    ],
)
def test_f60_others_are_refused_with_the_list_of_what_is_read(fields: Mapping[str, Any], what: str) -> None:
    with pytest.raises(SourceError, match=rf"{what}.* supported: awq .*gptq .*fp8 .*compressed-tensors"):
        parse_quantization({"quantization_config": fields})


def test_plain_weights_have_no_quantization() -> None:
    assert parse_quantization({}) is None
