"""Quantized checkpoints on one rank and on two: what a group of inputs shares holds wherever the shards are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fakes.checkpoint_files import ModelFiles, write_model
from tests.fakes.thread_group import on_ranks
from tests.fakes.tiny_llama import TinyLlama, random_tensors, tiny_config
from tests.fakes.tiny_tokenizers import tiny_tokenizer
from tests.weights.quantized_layouts import Written, awq, gptq
from tests.worker.harness import answer
from tests.worker.parallel.test_sharded_model import assert_close, run_all
from worker_svc.parallel.group import ALONE

# Of two ranks each has 64 and 192 inputs of o_proj and down_proj: the border lies inside a group of 128.
SHAPE = TinyLlama(num_layers=1, hidden_size=128, intermediate_size=384, head_dim=32)


@pytest.mark.parametrize("group_size", [-1, 32, 128])
@pytest.mark.parametrize("layout", ["gptq", "gptq desc_act", "awq"])
def test_f60_groups_hold_wherever_shards_are_cut(tmp_path: Path, layout: str, group_size: int) -> None:
    def written(weight: Any) -> Written:
        size = weight.shape[1] if group_size == -1 else group_size
        if layout == "awq":
            return awq(weight, size)
        return gptq(weight, shuffled="desc_act" in layout, group_size=size)

    tensors, matrices = {}, {}
    for name, tensor in random_tensors(SHAPE).items():
        if "_proj." not in name:
            tensors[name] = matrices[name] = tensor
            continue
        parts, matrices[name] = written(tensor)
        tensors |= {f"{name.removesuffix('.weight')}.{kind}": part for kind, part in parts.items()}
    fields = {"quant_method": layout.split()[0], "bits": 4, "group_size": group_size, "desc_act": "desc" in layout}
    plain, tokenizer = tiny_config(SHAPE), tiny_tokenizer([])
    dequantized = write_model(tmp_path / "plain", ModelFiles(plain, matrices, tokenizer))
    quantized = write_model(
        tmp_path / "quantized", ModelFiles({**plain, "quantization_config": fields}, tensors, tokenizer)
    )
    expected = [answer(sequence) for sequence in run_all(dequantized, ALONE.group)]
    assert [answer(sequence) for sequence in run_all(quantized, ALONE.group)] == expected
    first, second = on_ranks(2, lambda group: run_all(quantized, group))
    for found, other, wanted in zip(first, second, expected, strict=True):
        assert_close(answer(found), wanted)
        assert other.output == wanted.output
