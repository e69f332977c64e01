"""Real tensors under the real core: answers are bitwise the same under swap, recompute and hits in the host tier."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from benchmarks.core_on_runner import CoreOnRunner, Story
from kernels.api import Backend
from kernels.reference import ReferenceBackend
from kernels.select import open_backend
from octavo.internal.v1 import types_pb2
from scheduler_svc.core import laws
from scheduler_svc.core.limits import CoreLimits, PreemptionMode
from tests.fakes.tiny_llama import TINY_VOCAB_SIZE, TinyLlama, write_tiny_llama
from tests.worker.harness import RunnerShape, build_runner, sampling
from worker_svc.runner import Runner

NUM_HOST_BLOCKS = 64
SHARED = 16
"""Tokens with which every prompt begins: four blocks."""


def _prompts() -> list[list[int]]:
    random = Random(5)
    shared = [random.randrange(3, 250) for _ in range(SHARED)]
    return [[*shared, *(random.randrange(3, 250) for _ in range(random.randint(3, 9)))] for _ in range(6)]


def _sampling(key: int, max_tokens: int = 14) -> types_pb2.SamplingParams:
    return sampling(max_tokens=max_tokens, temperature=key % 2, seed=key, num_logprobs=0)


@pytest.fixture(scope="module", params=["reference", "auto"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Room for two of the prompts with their answers."""
    directory: Path = write_tiny_llama(tmp_path_factory.mktemp("tiny"), TinyLlama())
    backend: Backend = ReferenceBackend() if request.param == "reference" else open_backend("auto", 1)
    shape = RunnerShape(num_blocks=16, vocab_size=TINY_VOCAB_SIZE, num_host_blocks=NUM_HOST_BLOCKS, max_step_tokens=32)
    return build_runner(directory, shape, backend=backend)


@pytest.fixture(scope="module")
def alone(runner: Runner) -> list[Story]:
    """What each prompt is answered with when nothing else is there, and nothing is cached."""
    stories = []
    for key, prompt in enumerate(_prompts(), 1):
        pair = CoreOnRunner(runner, CoreLimits(enable_prefix_caching=False))
        pair.submit(key, prompt, _sampling(key))
        pair.run()
        stories.append(pair.stories[key])
    assert all(len(story.token_ids) == len(story.logprobs) == 14 for story in stories)
    assert len({tuple(story.token_ids) for story in stories}) > 3
    return stories


def _crowded(runner: Runner, mode: PreemptionMode, num_host_blocks: int) -> CoreOnRunner:
    """All prompts at once, in a pool for two of them; better ones keep displacing those that run."""
    pair = CoreOnRunner(runner, CoreLimits(preemption_mode=mode), num_host_blocks)
    for key, prompt in enumerate(_prompts(), 1):
        pair.submit(key, prompt, _sampling(key), priority=-key)
        for _ in range(2):
            pair.step()
            laws.check(pair.core)
    pair.run()
    return pair


@pytest.mark.parametrize("mode", list(PreemptionMode))
def test_preempted_answers_are_bitwise_those_given_alone(
    runner: Runner, alone: list[Story], mode: PreemptionMode
) -> None:
    pair = _crowded(runner, mode, NUM_HOST_BLOCKS)
    assert list(pair.stories.values()) == alone
    statistics = pair.statistics
    assert statistics.num_preemptions > 2
    if mode is PreemptionMode.SWAP:
        assert set(statistics.num_preemptions_by_kind) == {"swap"}
        assert statistics.num_host_cached_tokens > 0
    elif mode is PreemptionMode.RECOMPUTE:
        assert set(statistics.num_preemptions_by_kind) == {"recompute"}


def test_hits_in_the_host_tier_change_no_bit(runner: Runner, alone: list[Story]) -> None:
    pair = CoreOnRunner(runner, CoreLimits(preemption_mode=PreemptionMode.SWAP), NUM_HOST_BLOCKS)
    prompts = _prompts()
    pair.submit(1, prompts[0], _sampling(1))
    pair.run()
    for key in range(100, 104):  # others overwrite its blocks
        pair.submit(key, [key] * 45, _sampling(key, 4))
        pair.run()
    assert pair.statistics.num_demoted_blocks > 0
    before = pair.statistics.num_host_cached_tokens
    for key in range(2, 7):
        pair.submit(key, prompts[key - 1], _sampling(key))
        pair.run()
    assert pair.statistics.num_host_cached_tokens - before >= SHARED
    assert [pair.stories[key] for key in range(1, 7)] == alone
