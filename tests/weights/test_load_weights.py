"""Every tensor is accounted for, and one error says everything that does not fit."""

import logging
import weakref
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.weights import tiny_checkpoints
from worker_svc.weights import ExpectedTensor, TensorSpec, Weights, WeightsError
from worker_svc.weights.safetensors_checkpoint import SafetensorsCheckpoint

EXPECTED = {name: ExpectedTensor(shape) for name, shape in tiny_checkpoints.shapes().items()}


def _checkpoint(directory: Path, weights: dict[str, torch.Tensor]) -> SafetensorsCheckpoint:
    save_file(weights, directory / "model.safetensors")
    return SafetensorsCheckpoint.from_directory(directory)


def test_each_tensor_is_what_was_written(tmp_path: Path) -> None:
    weights = tiny_checkpoints.random_weights()
    loaded = tiny_checkpoints.load_all(_checkpoint(tmp_path, weights), torch.float32)
    assert list(loaded) == list(EXPECTED)
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


class _Counted:
    """A checkpoint that notes what was read of it, and which of that is still held."""

    def __init__(self, stored: SafetensorsCheckpoint) -> None:
        self._stored = stored
        self.read: list[str] = []
        self.held: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    @property
    def quantization(self) -> None:
        return None

    def specs(self) -> Mapping[str, TensorSpec]:
        return self._stored.specs()

    def load(self, name: str) -> torch.Tensor:
        self.read.append(name)
        tensor = self._stored.load(name)
        self.held.add(tensor)
        return tensor

    def close(self) -> None:
        self._stored.close()


def test_a_tensor_is_read_when_it_is_taken_and_not_kept(tmp_path: Path) -> None:
    checkpoint = _Counted(_checkpoint(tmp_path, tiny_checkpoints.random_weights()))
    weights = Weights(EXPECTED, checkpoint, torch.bfloat16)
    assert checkpoint.read == []
    for count, name in enumerate(EXPECTED, start=1):
        weights.take(name)
        assert checkpoint.read[count - 1 :] == [name]
        assert not checkpoint.held


def test_f50_missing_renamed_extra_and_misshapen_tensors_are_one_error(tmp_path: Path) -> None:
    weights = tiny_checkpoints.random_weights()
    weights["model.final_norm.weight"] = weights.pop("model.norm.weight")
    weights["model.layers.7.mlp.up_proj.weight"] = torch.ones(3, 5)
    weights["model.layers.1.mlp.down_proj.weight"] = torch.ones(96, 64)
    del weights["model.layers.0.self_attn.k_proj.weight"]
    with pytest.raises(WeightsError) as caught:
        tiny_checkpoints.load_all(_checkpoint(tmp_path, weights), torch.float32)
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


def test_a_tied_head_rotary_buffers_and_scales_of_attention_may_be_there(tmp_path: Path) -> None:
    weights = tiny_checkpoints.random_weights()
    for name in ("attn.q_scale", "attn.prob_scale", "q_scale", "k_scale", "qkv_proj.v_scale", "k_proj.output_scale"):
        weights[f"model.layers.0.self_attn.{name}"] = torch.tensor(1.0)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    tied = {name: shape for name, shape in EXPECTED.items() if name != "lm_head.weight"}
    assert tiny_checkpoints.load_all(_checkpoint(tmp_path, weights), torch.float32, tied).keys() == tied.keys()


def test_f50_an_untied_head_must_be_there(tmp_path: Path) -> None:
    weights = tiny_checkpoints.random_weights()
    del weights["lm_head.weight"]
    with pytest.raises(WeightsError, match=r"lm_head\.weight \[48, 64\]"):
        tiny_checkpoints.load_all(_checkpoint(tmp_path, weights), torch.float32)


def test_f50_conversions_are_logged_once_for_each_type(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = tiny_checkpoints.random_weights()
    weights["model.norm.weight"] = weights["model.norm.weight"].bfloat16()
    with caplog.at_level(logging.INFO, logger="worker_svc.weights.load"):
        loaded = tiny_checkpoints.load_all(_checkpoint(tmp_path, weights), torch.bfloat16)
    assert {tensor.dtype for tensor in loaded.values()} == {torch.bfloat16}
    assert caplog.messages == ["20 of 21 tensors are converted from torch.float32 to torch.bfloat16"]


def test_values_float16_cannot_hold_are_refused_by_name(tmp_path: Path) -> None:
    weights = {"a": torch.tensor([1.0, 70000.0])}
    with pytest.raises(WeightsError, match=r"tensor a holds 70000, more than float16 can"):
        tiny_checkpoints.load_all(_checkpoint(tmp_path, weights), torch.float16, {"a": ExpectedTensor((2,))})


def test_quantized_tensors_are_refused_by_name(tmp_path: Path) -> None:
    weights = {"a": torch.ones(2, dtype=torch.int8)}
    with pytest.raises(WeightsError, match=r"not a plain float .*\n  a: torch\.int8 in model\.safetensors"):
        tiny_checkpoints.load_all(_checkpoint(tmp_path, weights), torch.bfloat16, {"a": ExpectedTensor((2,))})


def test_nothing_is_read_when_something_does_not_fit(tmp_path: Path) -> None:
    checkpoint = _Counted(_checkpoint(tmp_path, tiny_checkpoints.random_weights()))
    with pytest.raises(WeightsError, match="missing"):
        Weights(EXPECTED | {"x": ExpectedTensor((1,))}, checkpoint, torch.float32)
    assert checkpoint.read == []
