"""The default model answers bitwise alike however it is run: ids and logprobs, greedy and seeded, in fp32 and bf16.

Every run is compared with the same sequence alone on one thread in the longest chunks. The sequences are made so that
edges matter: prompts, chunks, prefix hits and outputs cross positions 256 and 512, where attention folds partitions.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch

from kernels.api import Backend
from kernels.cpu import CpuBackend, unavailable_reason
from kernels.cpu.extension import openmp_runtimes
from octavo.internal.v1 import types_pb2
from octavo.phases import Phases
from octavo.sources import DEFAULT_MODEL, resolve
from tests.worker.harness import Answer, Driver, RunnerShape, Tracked, answer, build_runner, sampling
from worker_svc.config import WorkerConfig
from worker_svc.fingerprint import numerics_fingerprint
from worker_svc.loading import load

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHAPE = RunnerShape(num_slots=32, num_blocks=256, block_size=16, max_model_len=640, max_step_tokens=640)
NUM_OUTPUT_TOKENS = 8
# Above the model's special tokens; the shorter prompts are its beginnings.
TEXT = [100 + (7 * n * n + 31 * n) % 40_000 for n in range(515)]


@dataclass(frozen=True)
class Case:
    """A sequence that every run repeats."""

    prompt: list[int]
    params: types_pb2.SamplingParams


def case(num_prompt: int, logprobs_start: int, **changes: object) -> Case:
    """The beginning of the text, with logprobs of the prompt from a position on."""
    return Case(
        TEXT[:num_prompt],
        sampling(
            max_tokens=NUM_OUTPUT_TOKENS,
            num_logprobs=4,
            num_prompt_logprobs=3,
            prompt_logprobs_start=logprobs_start,
            **changes,
        ),
    )


CASES = {
    "greedy": case(24, 0),
    "seeded": case(45, 30, temperature=1.0, top_p=0.95, seed=7),
    # Its output crosses position 256.
    "edge": case(253, 241, temperature=0.8, top_k=50, seed=11),
    # Its prompt does not fit the longest chunk.
    "long": case(515, 497, repetition_penalty=1.1),
}
# Tokens of the two long prompts that a prefix cache may hold: whole blocks, before the first wanted logprob.
HITS = {"edge": 240, "long": 496}
LONGEST_CHUNK = 512


@dataclass
class Worker:
    """One runner with its weights, and every case's answer when it had the runner to itself."""

    dtype: str
    backend: Backend
    driver: Driver
    # The long case, whose blocks stay filled.
    donor: Tracked
    expected: dict[str, Answer]

    def add(self, *names: str) -> dict[str, Tracked]:
        return {name: self.driver.add(CASES[name].prompt, CASES[name].params) for name in names}

    def add_with_hits(self, *names: str) -> dict[str, Tracked]:
        """Cases whose prefix, where they have a long one, is found in the donor's blocks."""
        added = self.add(*names)
        for name in added.keys() & HITS.keys():
            self.driver.borrow(added[name], self.donor, HITS[name])
        return added

    def check(self, sequences: Mapping[str, Tracked]) -> None:
        assert {name: answer(sequence) for name, sequence in sequences.items()} == {
            name: self.expected[name] for name in sequences
        }


@pytest.fixture(scope="module", params=DTYPES)
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    num_threads = torch.get_num_threads()
    backend = CpuBackend(1)
    driver = Driver(build_runner(resolve(DEFAULT_MODEL), SHAPE, DTYPES[request.param], backend))
    assert backend.info.batch_invariant, backend.info.invariance_note
    alone = {name: driver.add(case.prompt, case.params) for name, case in CASES.items()}
    alone["long"].keeps_blocks = True
    for sequence in alone.values():
        driver.finish(sequence, chunk=LONGEST_CHUNK)
    yield Worker(
        request.param, backend, driver, alone["long"], {name: answer(sequence) for name, sequence in alone.items()}
    )
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def one_thread(worker: Worker) -> None:
    worker.backend.set_num_threads(1)


def run(driver: Driver, sequences: Sequence[Tracked], chunks: Sequence[int], num_output: int) -> None:
    """Steps, each sequence in chunks of its own size, until all have ended or have `num_output` tokens."""
    sizes = {sequence.key: size for sequence, size in zip(sequences, chunks, strict=True)}
    while going := [s for s in sequences if not s.finish and len(s.output) < num_output]:
        driver.step({s.key: min(sizes[s.key], len(s.tokens) - s.num_computed) for s in going})


def test_the_expected_answers_are_whole(worker: Worker) -> None:
    for name, found in worker.expected.items():
        num_prompt, start = len(CASES[name].prompt), CASES[name].params.prompt_logprobs_start
        assert len(found.output) == len(found.logprobs) == NUM_OUTPUT_TOKENS
        assert list(found.prompt_logprobs) == list(range(max(start, 1), num_prompt))
    # Seeded sampling chooses by its own lights.
    assert worker.expected["greedy"].output != worker.expected["seeded"].output


def test_chunk_sizes_change_nothing(worker: Worker) -> None:
    sequences = worker.add("greedy", "seeded", "edge", "long")
    # Enough is left for chunks to begin on either side of positions 256 and 512.
    worker.driver.borrow(sequences["edge"], worker.donor, 112)
    worker.driver.borrow(sequences["long"], worker.donor, 400)
    run(worker.driver, list(sequences.values()), [1, 7, 7, 64], NUM_OUTPUT_TOKENS)
    worker.check(sequences)


def test_company_prefix_hits_and_a_change_of_threads_change_nothing(worker: Worker) -> None:
    driver = worker.driver
    sequences = worker.add_with_hits(*CASES)
    company = [
        driver.add(TEXT[n : n + 1 + n % 8], sampling(temperature=1.0, seed=n, num_logprobs=n % 3, max_tokens=12))
        for n in range(SHAPE.num_slots - len(CASES))
    ]
    rows = [*company[::2], *sequences.values(), *company[1::2]]
    chunks = [LONGEST_CHUNK] * len(rows)
    worker.backend.set_num_threads(2)
    run(driver, rows, chunks, 3)
    worker.backend.set_num_threads(1)
    run(driver, rows, chunks, NUM_OUTPUT_TOKENS)
    worker.check(sequences)
    for row in company:
        driver.preempt(row)


def test_preemption_changes_nothing(worker: Worker) -> None:
    driver = worker.driver
    sequences = worker.add_with_hits("seeded", "edge", "long")
    run(driver, list(sequences.values()), [64, 7, 7], 5)
    for sequence in sequences.values():
        driver.preempt(sequence)
    # Computed again: the output so far too, in one chunk with the prompt; of the long ones the cache holds a part.
    driver.borrow(sequences["edge"], worker.donor, 128)
    driver.borrow(sequences["long"], worker.donor, HITS["long"])
    driver.finish(*sequences.values(), chunk=LONGEST_CHUNK)
    worker.check(sequences)


def test_another_worker_of_the_same_numerics_goes_on_alike(worker: Worker) -> None:
    lost = worker.add_with_hits("seeded", "edge")
    run(worker.driver, list(lost.values()), [64, 64], 5)
    config = WorkerConfig(
        dtype=worker.dtype,
        kernels="cpu",
        num_threads=1,
        max_model_len=SHAPE.max_model_len,
        num_kv_blocks=64,
        max_num_seqs=4,
        max_num_batched_tokens=SHAPE.max_step_tokens,
    )
    second = load(config, Phases())
    # Scheduled events, and so receipts, repeat these two fields of Hello.
    model = second.hello.model
    versions = {name: importlib.metadata.version(name) for name in ("octavo", "torch", "llguidance")}
    capability = torch.backends.cpu.get_cpu_capability()
    assert model.batch_invariant
    assert model.numerics == numerics_fingerprint(
        model.fingerprint, worker.dtype, worker.backend.info, versions, capability
    )
    driver = Driver(second.runner)
    second.runner.reset()
    resumed = {name: driver.resume(sequence) for name, sequence in lost.items()}
    driver.finish(*resumed.values(), chunk=64)
    worker.check(resumed)
    for sequence in lost.values():
        worker.driver.preempt(sequence)


def test_torch_and_the_kernels_share_one_openmp(worker: Worker) -> None:
    assert len(openmp_runtimes()) == 1
