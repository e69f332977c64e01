"""A model of quantized matrices that stay what they are, as on a GPU, against the same one dequantized when loaded.

What a cut or stacked matrix stands for is bitwise what the cut or stacked floats are, so the answers are the same, on
one rank and on several. The kernels here multiply what a matrix stands for; what GPU kernels make of the codes is
tested beside those.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.api import Backend
from kernels.reference import ReferenceBackend
from octavo.phases import Phases
from tests.fakes.checkpoint_files import ModelFiles, write_model
from tests.fakes.eager_device import EagerDevice, PaddedReference
from tests.fakes.thread_group import on_ranks
from tests.fakes.tiny_llama import TINY_VOCAB_SIZE, TinyLlama, random_tensors, tiny_config
from tests.fakes.tiny_tokenizers import tiny_tokenizer
from tests.weights.quantized_layouts import LAYOUTS, quantized
from tests.worker.harness import Answer, Driver, RunnerShape, answer, build_runner, sampling
from worker_svc.config import WorkerConfig
from worker_svc.device.workplace import Workplace
from worker_svc.loading import load
from worker_svc.parallel.group import TPGroup

SHAPE = RunnerShape(vocab_size=TINY_VOCAB_SIZE, max_model_len=64)
PROMPT = [(7 * n * n + 3 * n) % TINY_VOCAB_SIZE for n in range(20)]
# qkv, output, gate and up, down.
MATRICES_OF_A_LAYER = 4


def write(directory: Path, layout: str, dtype: torch.dtype = torch.float32) -> Path:
    shape = TinyLlama(num_layers=1, dtype=dtype, attention_bias=True)
    tensors, _ = quantized(random_tensors(shape), layout)
    config = {**tiny_config(shape), "quantization_config": LAYOUTS[layout][1]}
    return write_model(directory, ModelFiles(config, tensors, tiny_tokenizer([])))


def answered(directory: Path, backend: Backend, group: TPGroup, dtype: torch.dtype) -> Answer:
    driver = Driver(build_runner(directory, SHAPE, dtype, backend, group))
    sequence = driver.add(PROMPT, sampling(max_tokens=3, num_logprobs=2, num_prompt_logprobs=1))
    driver.finish(sequence)
    return answer(sequence)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("layout", ["awq", "gptq desc_act", "fp8 blocks", "fp8 tensor", "packed", "int8"])
def test_kept_quantized_a_model_answers_as_dequantized(tmp_path: Path, layout: str, num_ranks: int) -> None:
    directory, dtype = write(tmp_path, layout), torch.bfloat16
    backends = [PaddedReference() for _ in range(num_ranks)]
    expected = on_ranks(num_ranks, lambda group: answered(directory, ReferenceBackend(), group, dtype))
    found = on_ranks(num_ranks, lambda group: answered(directory, backends[group.rank], group, dtype))
    assert found == expected
    assert len(found[0].output) == 3
    for backend in backends:
        assert len(backend.quantized) == MATRICES_OF_A_LAYER


def test_projections_that_are_quantized_otherwise_are_dequantized_together(tmp_path: Path) -> None:
    """Keys whose inputs belong to other groups than those of queries and values."""
    directory = write(tmp_path, "gptq")
    other = write(tmp_path / "other", "gptq desc_act")
    tensors, shuffled = (load_file(path / "model.safetensors") for path in (directory, other))
    tensors.update({name: tensor for name, tensor in shuffled.items() if ".k_proj." in name})
    save_file(tensors, directory / "model.safetensors")
    backend = PaddedReference()
    expected = on_ranks(1, lambda group: answered(directory, ReferenceBackend(), group, torch.float32))
    assert on_ranks(1, lambda group: answered(directory, backend, group, torch.float32)) == expected
    assert len(backend.quantized) == MATRICES_OF_A_LAYER - 1


def test_the_start_says_what_becomes_of_the_matrices(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = write(tmp_path, "awq")
    small = WorkerConfig(max_num_seqs=2, max_num_batched_tokens=32, num_kv_blocks=8, max_model_len=64, num_threads=1)
    config = replace(small, model=str(directory))
    caplog.set_level(logging.INFO)
    load(config, Phases())
    kept = PaddedReference()
    load(config, Phases(), open_place=lambda *_: Workplace(EagerDevice(), kept, None))
    said = [message for message in caplog.messages if message.startswith("the matrices are quantized, awq")]
    assert ["dequantized" in message for message in said] == [True, False]
    assert len(kept.quantized) == MATRICES_OF_A_LAYER
