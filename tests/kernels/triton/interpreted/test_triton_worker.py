"""The worker's runner over the real GPU kernels: run ahead, through captured batches with padding rows, as on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from interpreter import interpreted_backend

from tests.fakes.eager_device import EagerDevice
from tests.fakes.tiny_llama import TINY_VOCAB_SIZE, TinyLlama, write_tiny_llama
from tests.worker.harness import Driver, RunnerShape, build_runner, sampling


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
