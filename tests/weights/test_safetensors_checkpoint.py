"""Checkpoints in safetensors files: the index decides, and what is wrong is named."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.sources import ModelSource, Origin
from tests.weights import tiny_checkpoints
from worker_svc.weights import Checkpoint, WeightsError, open_checkpoint


def _open(directory: Path) -> Checkpoint:
    return open_checkpoint(ModelSource("m", Origin.DIRECTORY, directory, directory), torch.float32)


def test_one_file_and_shards_hold_the_same(tmp_path: Path) -> None:
    weights = tiny_checkpoints.random_weights()
    single = tmp_path / "single"
    single.mkdir()
    save_file(weights, single / "model.safetensors")
    tiny_checkpoints.write_sharded(tmp_path / "sharded", weights, num_shards=3)
    for directory in (single, tmp_path / "sharded"):
        checkpoint = _open(directory)
        assert checkpoint.specs().keys() == weights.keys()
        for name, tensor in weights.items():
            spec = checkpoint.specs()[name]
            assert (spec.shape, spec.dtype) == (tuple(tensor.shape), torch.float32)
            assert torch.equal(checkpoint.load(name), tensor)


def test_the_index_decides_which_shard_a_tensor_is_in(tmp_path: Path) -> None:
    weights = tiny_checkpoints.random_weights()
    weight_map = tiny_checkpoints.write_sharded(tmp_path, weights)
    stale = next(name for name, file in weight_map.items() if file.startswith("model-00001"))
    other = tmp_path / "model-00002-of-00002.safetensors"
    save_file(load_file(other) | {stale: torch.zeros_like(weights[stale])}, other)
    assert torch.equal(_open(tmp_path).load(stale), weights[stale])
    tiny_checkpoints.write_index(tmp_path, weight_map | {stale: other.name})
    assert torch.equal(_open(tmp_path).load(stale), torch.zeros_like(weights[stale]))


def test_a_file_beside_the_index_is_not_looked_at(tmp_path: Path) -> None:
    weights = tiny_checkpoints.random_weights()
    tiny_checkpoints.write_sharded(tmp_path, weights)
    save_file({"other": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    assert _open(tmp_path).specs().keys() == weights.keys()


def test_an_absent_shard_is_named(tmp_path: Path) -> None:
    tiny_checkpoints.write_sharded(tmp_path, tiny_checkpoints.random_weights())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"model-00002-of-00002\.safetensors: the file is absent"):
        _open(tmp_path)


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    tiny_checkpoints.write_sharded(tmp_path, tiny_checkpoints.random_weights())
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(WeightsError, match=r"model-00002-of-00002\.safetensors: its tensors reach past the end"):
        _open(tmp_path)


def test_a_tensor_absent_from_the_shard_the_index_names_is_named(tmp_path: Path) -> None:
    weight_map = tiny_checkpoints.write_sharded(tmp_path, tiny_checkpoints.random_weights())
    tiny_checkpoints.write_index(tmp_path, weight_map | {"ghost": "model-00001-of-00002.safetensors"})
    with pytest.raises(WeightsError, match=r"model-00001-of-00002\.safetensors: the index places tensor ghost here"):
        _open(tmp_path)


def test_tensors_outlive_the_checkpoint(tmp_path: Path) -> None:
    save_file({"a": torch.arange(5.0)}, tmp_path / "model.safetensors")
    checkpoint = _open(tmp_path)
    tensor = checkpoint.load("a")
    checkpoint.close()
    (tmp_path / "model.safetensors").unlink()
    assert tensor.tolist() == [0, 1, 2, 3, 4]
    tensor[0] = 9


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="holds no tensor b"):
        _open(tmp_path).load("b")
