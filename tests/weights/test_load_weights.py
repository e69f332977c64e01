"""Every tensor is accounted for, and one error says everything that does not fit."""

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.weights import tiny_checkpoints
from worker_svc.weights import ExpectedTensor, WeightsError, load_weights
from worker_svc.weights.safetensors_checkpoint import SafetensorsCheckpoint

EXPECTED = {name: ExpectedTensor(shape) for name, shape in tiny_checkpoints.shapes().items()}


def _checkpoint(directory: Path, weights: dict[str, torch.Tensor]) -> SafetensorsCheckpoint:
    save_file(weights, directory / "model.safetensors")
    return SafetensorsCheckpoint.from_directory(directory)


def test_all_are_loaded_in_the_order_asked_for(tmp_path: Path) -> None:
    weights = tiny_checkpoints.random_weights()
    calls: list[tuple[int, int, int]] = []
    loaded = load_weights(EXPECTED, _checkpoint(tmp_path, weights), torch.float32, lambda *call: calls.append(call))
    assert list(loaded) == list(EXPECTED)
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    assert [call[:2] for call in calls] == [(count, len(EXPECTED)) for count in range(1, len(EXPECTED) + 1)]
    assert calls[-1][2] == sum(tensor.nbytes for tensor in weights.values())


def test_f50_missing_renamed_extra_and_misshapen_tensors_are_one_error(tmp_path: Path) -> None:
    weights = tiny_checkpoints.random_weights()
    weights["model.final_norm.weight"] = weights.pop("model.norm.weight")
    weights["model.layers.7.mlp.up_proj.weight"] = torch.ones(3, 5)
    weights["model.layers.1.mlp.down_proj.weight"] = torch.ones(96, 64)
    del weights["model.layers.0.self_attn.k_proj.weight"]
    with pytest.raises(WeightsError) as caught:
        load_weights(EXPECTED, _checkpoint(tmp_path, weights), torch.float32)
    lines = str(caught.value).splitlines()
    assert lines[1:] == [
        "2 tensors missing from the checkpoint:",
        "  model.layers.0.self_attn.k_proj.weight [32, 64]",
        "  model.norm.weight [64]",
        "2 tensors unexpected in the checkpoint:",
        "  model.final_norm.weight [64] in model.safetensors",
        "  model.layers.7.mlp.up_proj.weight [3, 5] in model.safetensors",
        "1 tensor of another shape:",
        "  model.layers.1.mlp.down_proj.weight: the model needs [64, 96], model.safetensors has [96, 64]",
    ]


def test_a_tied_head_and_rotary_buffers_may_be_there(tmp_path: Path) -> None:
    weights = tiny_checkpoints.random_weights()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    tied = {name: shape for name, shape in EXPECTED.items() if name != "lm_head.weight"}
    assert load_weights(tied, _checkpoint(tmp_path, weights), torch.float32).keys() == tied.keys()


def test_f50_an_untied_head_must_be_there(tmp_path: Path) -> None:
    weights = tiny_checkpoints.random_weights()
    del weights["lm_head.weight"]
    with pytest.raises(WeightsError, match=r"lm_head\.weight \[48, 64\]"):
        load_weights(EXPECTED, _checkpoint(tmp_path, weights), torch.float32)


def test_f50_conversions_are_logged_once_for_each_type(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = tiny_checkpoints.random_weights()
    weights["model.norm.weight"] = weights["model.norm.weight"].bfloat16()
    with caplog.at_level(logging.INFO, logger="worker_svc.weights.load"):
        loaded = load_weights(EXPECTED, _checkpoint(tmp_path, weights), torch.bfloat16)
    assert {tensor.dtype for tensor in loaded.values()} == {torch.bfloat16}
    assert caplog.messages == ["20 of 21 tensors converted from torch.float32 to torch.bfloat16"]


def test_values_float16_cannot_hold_are_refused_by_name(tmp_path: Path) -> None:
    weights = {"a": torch.tensor([1.0, 70000.0])}
    with pytest.raises(WeightsError, match=r"tensor a holds 70000, more than float16 can"):
        load_weights({"a": ExpectedTensor((2,))}, _checkpoint(tmp_path, weights), torch.float16)


def test_quantized_tensors_are_refused_by_name(tmp_path: Path) -> None:
    weights = {"a": torch.ones(2, dtype=torch.int8)}
    with pytest.raises(WeightsError, match=r"not a plain float .*\n  a: torch\.int8 in model\.safetensors"):
        load_weights({"a": ExpectedTensor((2,))}, _checkpoint(tmp_path, weights), torch.bfloat16)


def test_nothing_is_read_when_something_does_not_fit(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path, tiny_checkpoints.random_weights())
    calls: list[tuple[int, int, int]] = []
    with pytest.raises(WeightsError, match="missing"):
        load_weights(EXPECTED | {"x": ExpectedTensor((1,))}, checkpoint, torch.float32, lambda *c: calls.append(c))
    assert calls == []
