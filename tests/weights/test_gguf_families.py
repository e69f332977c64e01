"""Every supported family: what is converted from GGUF is the model it was made from, tensors and arithmetic."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig

from octavo.sources import ModelSource, resolve
from tests.weights.gguf_families import (
    CONTEXT_TOKENS,
    FAMILIES,
    TEMPLATE,
    bare_model,
    checkpoint_weights,
    make_model,
    write_gguf,
)
from worker_svc.weights import Checkpoint, open_checkpoint

TYPES = gguf.GGMLQuantizationType
# What no inference depends on.
_SILENT = {
    "_name_or_path", "architectures", "dtype", "initializer_range", "transformers_version", "use_cache",
    "attention_dropout", "embd_pdrop", "resid_pdrop",
    # Layers from which Qwen's windows would begin: it has none here.
    "max_window_layers",
}  # fmt: skip


def _written(tmp_path: Path, name: str, matrix_type: TYPES) -> tuple[ModelSource, Checkpoint, dict[str, torch.Tensor]]:
    family = FAMILIES[name]
    weights = checkpoint_weights(make_model(family))
    write_gguf(tmp_path / "m.gguf", family, weights, matrix_type)
    source = resolve(str(tmp_path / "m.gguf"), cache_dir=tmp_path / "cache")
    return source, open_checkpoint(source, torch.float16, cache_dir=tmp_path / "cache"), weights


def _said(config: dict[str, Any]) -> dict[str, Any]:
    return {key: _as_float32(value) for key, value in config.items() if key not in _SILENT}


def _as_float32(value: Any) -> Any:
    """The value with every float as a file keeps it."""
    if isinstance(value, dict):
        return {key: _as_float32(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_float32(item) for item in value]
    return float(np.float32(value)) if isinstance(value, float) else value


@pytest.mark.parametrize("name", FAMILIES)
def test_tensors_come_back_exactly(tmp_path: Path, name: str) -> None:
    _, checkpoint, weights = _written(tmp_path, name, TYPES.F16)
    assert checkpoint.specs().keys() == weights.keys()
    for tensor_name, tensor in weights.items():
        assert torch.equal(checkpoint.load(tensor_name), tensor.half()), tensor_name


@pytest.mark.parametrize("name", FAMILIES)
def test_q8_0_is_within_half_a_step(tmp_path: Path, name: str) -> None:
    _, checkpoint, weights = _written(tmp_path, name, TYPES.Q8_0)
    for tensor_name, tensor in weights.items():
        errors = (checkpoint.load(tensor_name).float() - tensor).abs()
        # Half a step of 1/127 of the block's largest, below 1/2; the scale's and the result's float16 beside it.
        assert errors.max() <= (0.5 / 127 / 2 + 2**-11 if tensor.ndim > 1 else 0), tensor_name


@pytest.mark.parametrize("name", FAMILIES)
def test_the_configuration_says_the_same(tmp_path: Path, name: str) -> None:
    source, _, _ = _written(tmp_path, name, TYPES.F16)
    ours, theirs = AutoConfig.from_pretrained(source.directory), FAMILIES[name].config
    assert type(ours) is type(theirs)
    ours_said, theirs_said = (_said(config.to_dict()) for config in (ours, theirs))
    differing = {key: (ours_said.get(key), value) for key, value in theirs_said.items() if ours_said.get(key) != value}
    assert differing == {}


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_computes_the_same_from_what_was_converted(tmp_path: Path, name: str) -> None:
    source, checkpoint, _ = _written(tmp_path, name, TYPES.F16)
    config = AutoConfig.from_pretrained(source.directory)
    theirs = make_model(FAMILIES[name])
    ours = bare_model(config)
    loaded = {tensor_name: checkpoint.load(tensor_name).float() for tensor_name in checkpoint.specs()}
    missing, unexpected = ours.load_state_dict(loaded, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if config.tie_word_embeddings else [], [])
    tokens = torch.randint(0, 256, (1, CONTEXT_TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for num_tokens in (5, CONTEXT_TOKENS):
            # Short and past every window and original context.
            prompt = tokens[:, :num_tokens]
            assert torch.equal(ours(prompt).logits, theirs(prompt).logits), num_tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_the_embedded_template_is_kept(tmp_path: Path, name: str) -> None:
    source, _, _ = _written(tmp_path, name, TYPES.F16)
    assert json.loads((source.directory / "tokenizer_config.json").read_text())["chat_template"] == TEMPLATE
