"""Tiny checkpoints and runners that the worker's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.scripted_model import Script, ScriptedModel, write_scripted_model
from tests.fakes.tiny_llama import TINY_VOCAB_SIZE, TinyLlama, write_tiny_llama
from tests.worker.harness import Driver, RunnerShape, build_runner
from worker_svc.runner import Runner


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random one-layer checkpoint."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), TinyLlama(num_layers=1))


@pytest.fixture(scope="session")
def tiny_runner(tiny_directory: Path) -> Runner:
    return build_runner(tiny_directory, RunnerShape(vocab_size=TINY_VOCAB_SIZE, num_host_blocks=8))


@pytest.fixture
def driver(tiny_runner: Runner) -> Driver:
    """An empty runner over the random checkpoint, driven."""
    tiny_runner.reset()
    return Driver(tiny_runner)


@pytest.fixture(scope="session")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> ScriptedModel:
    """Says " one two three four five six", then ends."""
    words = [f" {word}" for word in ("one", "two", "three", "four", "five", "six")]
    return write_scripted_model(tmp_path_factory.mktemp("parrot"), Script(words))


@pytest.fixture(scope="session")
def parrot_runner(parrot: ScriptedModel) -> Runner:
    return build_runner(parrot.directory)


@pytest.fixture
def parrot_driver(parrot_runner: Runner) -> Driver:
    parrot_runner.reset()
    return Driver(parrot_runner)
