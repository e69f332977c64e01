"""The same tiny model as safetensors and as a GGUF answers alike: names, row orders, offsets and configuration."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from kernels.select import open_backend
from octavo.sources import resolve
from tests.fakes.checkpoint_files import ModelFiles, write_model
from tests.fakes.thread_group import ThreadGroup, on_ranks
from tests.fakes.tiny_tokenizers import tiny_tokenizer
from tests.weights.gguf_families import CONTEXT_TOKENS, FAMILIES, checkpoint_weights, make_model, write_gguf
from tests.worker.harness import Driver, RunnerShape, build_runner, sampling
from worker_svc.runner import Runner

F16, Q8 = gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.Q8_0
PROMPT = [5, 90, 17, 203, 44, 8, 121, 250, 33]
SHAPE = RunnerShape(max_model_len=CONTEXT_TOKENS)


def rounded(tensor: torch.Tensor, matrix_type: gguf.GGMLQuantizationType) -> torch.Tensor:
    """What a file of this type can hold of it: vectors stay as they are."""
    if tensor.ndim == 1:
        return tensor
    return torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), matrix_type), matrix_type).copy())


def logprobs(runner: Runner) -> tuple[list[int], list[float]]:
    driver = Driver(runner)
    sequence = driver.add(PROMPT, sampling(max_tokens=CONTEXT_TOKENS - len(PROMPT), num_logprobs=0))
    driver.finish(sequence)
    return sequence.output, [float(found.tokens[0]) for found in sequence.logprobs]


@pytest.mark.parametrize(("name", "matrix_type"), [*((name, F16) for name in FAMILIES), ("llama", Q8), ("qwen2", Q8)])
def test_f54_gguf_and_safetensors_answer_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, matrix_type: gguf.GGMLQuantizationType
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    family = FAMILIES[name]
    model = make_model(family)
    tensors = checkpoint_weights(model)
    write_gguf(tmp_path / "m.gguf", family, tensors, matrix_type)
    tensors = {each: rounded(tensor, matrix_type) for each, tensor in tensors.items()}
    config = family.config.to_dict() | {"architectures": [type(model).__name__]}
    directory = write_model(tmp_path / "safetensors", ModelFiles(config, tensors, tiny_tokenizer([])))
    plain = build_runner(directory, SHAPE, torch.float32, open_backend("auto", 1))
    source = resolve(str(tmp_path / "m.gguf"))
    converted = build_runner(source, SHAPE, torch.float32, open_backend("auto", 1))
    expected_ids, expected = logprobs(plain)
    found_ids, found = logprobs(converted)
    assert len(found_ids) == CONTEXT_TOKENS - len(PROMPT)
    assert found_ids == expected_ids
    # Bases and factors are fp32 in the file.
    assert found == pytest.approx(expected, abs=2e-4)

    def on_rank(group: ThreadGroup) -> tuple[list[int], list[float]]:
        return logprobs(build_runner(source, SHAPE, torch.float32, open_backend("auto", 1), group))

    shared_ids, shared = on_ranks(2, on_rank)[0]
    assert shared_ids == expected_ids
    assert shared == pytest.approx(expected, abs=2e-4)
