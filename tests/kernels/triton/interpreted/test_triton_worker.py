"""The worker's runner over the real GPU kernels: run ahead, through captured batches with padding rows, as on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from interpreter import interpreted_backend

from kernels.reference import ReferenceBackend
from tests.fakes.checkpoint_files import ModelFiles, write_model
from tests.fakes.eager_device import EagerDevice
from tests.fakes.tiny_llama import TINY_VOCAB_SIZE, TinyLlama, random_tensors, tiny_config, write_tiny_llama
from tests.fakes.tiny_tokenizers import tiny_tokenizer
from tests.weights.quantized_layouts import LAYOUTS, quantized
from tests.worker.harness import Driver, RunnerShape, build_runner, sampling


@pytest.mark.parametrize(
    ("layout", "kept"), [("awq", "4-bit codes"), ("gptq desc_act", "4-bit codes"), ("fp8 tensor", "float8_e4m3")]
)
def test_quantized_matrices_are_multiplied_as_they_are(tmp_path: Path, layout: str, kept: str) -> None:
    """Beside the reference over the dequantized ones; what differs is how bf16 activations round."""
    model = TinyLlama(num_layers=1, dtype=torch.bfloat16)
    tensors, _ = quantized(random_tensors(model), layout)
    config = {**tiny_config(model), "quantization_config": LAYOUTS[layout][1]}
    directory = write_model(tmp_path, ModelFiles(config, tensors, tiny_tokenizer([])))
    shape = RunnerShape(num_slots=2, num_blocks=8, block_size=16, max_model_len=32, vocab_size=TINY_VOCAB_SIZE)
    backend = interpreted_backend()
    found = []
    for kernels in (backend, ReferenceBackend()):
        driver = Driver(build_runner(directory, shape, torch.bfloat16, kernels))
        sequence = driver.add(list(range(5, 16)), sampling(max_tokens=1, num_prompt_logprobs=0))
        driver.finish(sequence)
        found.append(torch.tensor([logprob for _, (logprob, _, _) in sorted(sequence.prompt_logprobs.items())]))
    assert len(found[0]) == 10
    assert torch.allclose(found[0], found[1], atol=0.06)
    # qkv, output, gate and up, down; and the head.
    assert backend.info.kept_weights == f"{kept} (4), bfloat16 (1)"


def test_a_padded_graph_gives_what_single_launches_give(tmp_path: Path) -> None:
    """Three rows in a batch of four; one ends before the others."""
    directory = write_tiny_llama(tmp_path, TinyLlama(num_layers=1))
    shape = RunnerShape(num_slots=4, num_blocks=16, block_size=16, max_model_len=48, vocab_size=TINY_VOCAB_SIZE)
    outputs = []
    device = EagerDevice()
    for own in (replace(shape, device=EagerDevice()), replace(shape, device=device, graph_rows=(4,))):
        backend = interpreted_backend()
        runner = build_runner(directory, own, backend=backend)
        runner.capture_graphs()
        driver = Driver(runner)
        prompts = ([5, 6, 7], list(range(20, 37)), [9])
        sequences = [driver.add(tokens, sampling(max_tokens=2 + index)) for index, tokens in enumerate(prompts)]
        driver.finish(*sequences)
        outputs.append([sequence.output for sequence in sequences])
    assert outputs[0] == outputs[1]
    assert [len(output) for output in outputs[0]] == [2, 3, 4]
    assert device.events.count("replay 1") == 3
