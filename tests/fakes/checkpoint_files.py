"""Writes a Hugging Face model directory from its parts: config, tensors, tokenizer.

Knows the file names; must not know what the model computes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

# Ends with "assistant:", so that a model scripted to start at ":" answers any chat.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True)
class ModelFiles:
    """The contents of a model directory. `generation_config` None: no such file."""

    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    tokenizer: Tokenizer
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    generation_config: Mapping[str, Any] | None = None


def write_model(directory: Path, files: ModelFiles) -> Path:
    """Writes the directory (made if need be) and returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", files.config)
    save_file({name: tensor.contiguous() for name, tensor in files.tensors.items()}, directory / "model.safetensors")
    files.tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        **files.tokenizer_config,
    }
    _write_json(directory / "tokenizer_config.json", tokenizer_config)
    if files.generation_config is not None:
        _write_json(directory / "generation_config.json", files.generation_config)
    return directory


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
