"""The default model's weights are those that transformers dequantizes from the same file."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo.sources import resolve
from worker_svc.weights import open_checkpoint


@pytest.mark.slow
def test_every_tensor_equals_transformers() -> None:
    source = resolve("default")
    theirs = AutoModelForCausalLM.from_pretrained(
        source.weights.parent, gguf_file=source.weights.name, dtype=torch.float32
    ).state_dict()
    del theirs["lm_head.weight"]
    for dtype in (torch.float32, torch.bfloat16):
        checkpoint = open_checkpoint(source, dtype)
        assert checkpoint.specs().keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert torch.equal(checkpoint.load(name), tensor.to(dtype)), name
