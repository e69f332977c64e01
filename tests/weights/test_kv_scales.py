"""Scales of an fp8 KV cache in the places where quantizers put them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from octavo.sources import ModelSource, Origin
from worker_svc.weights import WeightsError
from worker_svc.weights.kv_scales import read_kv_scales


def source(directory: Path, tensors: dict[str, torch.Tensor]) -> ModelSource:
    save_file({"model.norm.weight": torch.ones(2), **tensors}, directory / "model.safetensors")
    return ModelSource("m", Origin.DIRECTORY, directory, directory)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.qkv_proj.k_scale", "self_attn.qkv_proj.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    ],
)
def test_every_place_is_found(tmp_path: Path, key: str, value: str) -> None:
    tensors = {}
    for layer in range(2):
        tensors[f"model.layers.{layer}.{key}"] = torch.tensor(0.5 + layer)
        tensors[f"model.layers.{layer}.{value}"] = torch.tensor([0.25])
    assert read_kv_scales(source(tmp_path, tensors), 2) == ((0.5, 0.25), (1.5, 0.25))


def test_one_scale_for_both(tmp_path: Path) -> None:
    assert read_kv_scales(source(tmp_path, {"model.layers.0.self_attn.kv_scale": torch.tensor(2.0)}), 1) == (
        (2.0, 2.0),
    )


def test_none_is_none(tmp_path: Path) -> None:
    assert read_kv_scales(source(tmp_path, {}), 2) is None


def test_half_of_them_and_bad_numbers_are_refused(tmp_path: Path) -> None:
    pair = {f"model.layers.0.self_attn.{kind}_scale": torch.tensor(1.0) for kind in "kv"}
    with pytest.raises(WeightsError, match=r"layers \[1\] have no scales"):
        read_kv_scales(source(tmp_path, pair), 2)
    pair["model.layers.0.self_attn.k_scale"] = torch.tensor(0.0)
    with pytest.raises(WeightsError, match=r"k_scale .* must be one positive number"):
        read_kv_scales(source(tmp_path, pair), 1)
