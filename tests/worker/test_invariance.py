"""One answer per request: ids and logprobs are bitwise the same however a sequence was run.

Equality, not tolerance, with every backend that claims it on this machine, in fp32 and bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kernels.api import SecondCopies
from kernels.select import open_backend
from octavo.internal.v1 import types_pb2
from tests.fakes.tiny_llama import TINY_VOCAB_SIZE, TinyLlama, write_tiny_llama
from tests.worker.harness import Driver, RunnerShape, answer, build_runner, sampling
from worker_svc.runner import Runner

# Crosses an attention partition of 256 positions.
PROMPT = [(7 * n * n + 3 * n) % TINY_VOCAB_SIZE for n in range(270)]
PARAMS = sampling(
    temperature=0.9, top_p=0.95, seed=5, max_tokens=10, num_logprobs=4, num_prompt_logprobs=3, repetition_penalty=1.1
)


def choices() -> list[str]:
    """The C++ kernels where they were built; the reference always."""
    return ["reference", "cpu"] if open_backend("auto", None).info.name == "cpu" else ["reference"]


@dataclass(frozen=True)
class Setting:
    """A checkpoint and how it is computed, but for the number of threads."""

    directory: Path
    backend_name: str
    dtype: torch.dtype

    def runner(self, num_threads: int) -> Runner:
        shape = RunnerShape(
            num_slots=32,
            vocab_size=TINY_VOCAB_SIZE,
            max_model_len=600,
            num_blocks=320,
            block_size=8,
            max_step_tokens=600,
        )
        backend = open_backend(self.backend_name, num_threads)
        runner = build_runner(self.directory, shape, self.dtype, backend)
        if isinstance(backend, SecondCopies):
            backend.make_copies(lambda: True)
        assert backend.info.batch_invariant, backend.info.invariance_note
        return runner


@pytest.fixture(params=[(name, dtype) for name in choices() for dtype in (torch.float32, torch.bfloat16)], ids=str)
def setting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Setting]:
    name, dtype = request.param
    num_threads = torch.get_num_threads()
    yield Setting(write_tiny_llama(tmp_path, TinyLlama(intermediate_size=1100, dtype=dtype)), name, dtype)
    torch.set_num_threads(num_threads)


def test_company_chunks_preemption_and_threads_change_nothing(setting: Setting) -> None:
    driver = Driver(setting.runner(num_threads=1))
    alone = driver.add(PROMPT, PARAMS)
    driver.finish(alone, chunk=512)
    expected = answer(alone)
    assert len(expected.output) == 10
    assert len(expected.prompt_logprobs) == len(PROMPT) - 1

    for chunk in (13, 256):
        company = [driver.add(PROMPT[:length], sampling(temperature=1.0, seed=length)) for length in (1, 30, 100)]
        sequence = driver.add(PROMPT, PARAMS)
        driver.step({s.key: min(chunk, len(s.tokens)) for s in (*company, sequence)})
        driver.preempt(sequence)
        driver.finish(*company, sequence, chunk=chunk)
        assert answer(sequence) == expected

    driver = Driver(setting.runner(num_threads=2))
    sequence = driver.add(PROMPT, PARAMS)
    driver.finish(sequence, chunk=64)
    assert answer(sequence) == expected


def test_a_whole_prompt_is_the_same_in_any_chunks(setting: Setting) -> None:
    """515 tokens cross two partitions, and one chunk of 512 leaves three."""
    prompt = [(11 * n * n + 5 * n) % TINY_VOCAB_SIZE for n in range(515)]
    params = sampling(seed=3, max_tokens=3, num_logprobs=5, num_prompt_logprobs=2)
    driver = Driver(setting.runner(num_threads=1))
    whole = driver.add(prompt, params)
    driver.finish(whole, chunk=len(prompt))
    expected = answer(whole)
    assert len(expected.prompt_logprobs) == len(prompt) - 1
    # One token at a time is slow in the reference, which the kernels' own tests hold to it.
    for chunk in (1, 7, 64, 512) if setting.backend_name == "cpu" else (64, 512):
        sequence = driver.add(prompt, params)
        driver.finish(sequence, chunk=chunk)
        assert answer(sequence) == expected, f"chunks of {chunk}"


@pytest.mark.parametrize(
    "params",
    [
        sampling(max_tokens=6, num_logprobs=4),
        sampling(max_tokens=6, num_logprobs=4, temperature=1.0, top_k=40, seed=17),
    ],
    ids=["greedy", "seeded"],
)
def test_prefix_hits_31_others_and_another_worker_change_nothing(
    setting: Setting, params: types_pb2.SamplingParams
) -> None:
    driver = Driver(setting.runner(num_threads=1))
    alone = driver.add(PROMPT, params)
    alone.keeps_blocks = True
    driver.finish(alone, chunk=512)
    expected = answer(alone)

    company = [
        driver.add(PROMPT[n : n + 1 + n % 9], sampling(temperature=1.0, seed=n, max_tokens=8, num_logprobs=n % 3))
        for n in range(31)
    ]
    hit = driver.add(PROMPT, params)
    driver.borrow(hit, alone, 264)
    lost = driver.add(PROMPT, params)
    driver.borrow(lost, alone, 128)
    rows = [*company[:15], hit, *company[15:]]
    driver.finish(*rows, chunk=64)
    assert answer(hit) == expected

    # The first worker dies in the middle of an answer: another, of two threads, has its prompt and what came of it.
    driver.step({lost.key: len(PROMPT) - 128})
    driver.step({lost.key: 1})
    heir = Driver(setting.runner(num_threads=2))
    resumed = heir.resume(lost)
    heir.finish(resumed, chunk=7 if setting.backend_name == "cpu" else 64)
    assert answer(resumed) == expected
