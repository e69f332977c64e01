"""Second copies of weights: made beside the steps, in use from some step on, and no bit is another for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.api import PackedLinear
from kernels.cpu import CpuBackend, unavailable_reason
from kernels.cpu.products import CpuLinear
from kernels.reference import ReferenceBackend
from octavo.machine import free_memory_bytes
from octavo.phases import Phases
from tests.fakes.tiny_llama import TINY_VOCAB_SIZE, TinyLlama, write_tiny_llama
from tests.worker.harness import Driver, RunnerShape, answer, build_runner, sampling
from worker_svc.config import WorkerConfig
from worker_svc.device.workplace import open_workplace
from worker_svc.loading import load
from worker_svc.parallel.group import ALONE
from worker_svc.second_copies import CopyMaker

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason="the kernels that make copies are not there")

NEVER_S = 1e6
PROMPT = range(3, 40)
PARAMS = sampling(temperature=0.9, seed=5, max_tokens=12, num_logprobs=4, num_prompt_logprobs=2)


class ListedBackend(CpuBackend):
    """Keeps a list of what it has packed."""

    def __init__(self, num_threads: int) -> None:
        super().__init__(num_threads)
        self.packed: list[CpuLinear] = []

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        packed = super().pack_linear(weight, bias)
        assert isinstance(packed, CpuLinear)
        self.packed.append(packed)
        return packed

    @property
    def num_copies(self) -> int:
        return sum(each.copy.panels is not None for each in self.packed)


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Matrices of bf16; computed with in fp32, no kernels' product but our own takes them."""
    return write_tiny_llama(tmp_path, TinyLlama(dtype=torch.bfloat16))


def opened(directory: Path, backend: CpuBackend) -> Driver:
    shape = RunnerShape(num_slots=2, vocab_size=TINY_VOCAB_SIZE)
    return Driver(build_runner(directory, shape, torch.float32, backend))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_copies_that_come_in_the_middle_change_no_bit(directory: Path, num_threads: int) -> None:
    driver = opened(directory, CpuBackend(num_threads, max_coded_bytes=0))
    plain = driver.add(PROMPT, PARAMS)
    driver.finish(plain)

    backend = ListedBackend(num_threads)
    driver = opened(directory, backend)
    sequence = driver.add(PROMPT, PARAMS)
    driver.step({sequence.key: len(PROMPT)})
    driver.step({sequence.key: 1})
    assert backend.num_copies == 0
    CopyMaker(backend, 0).join()
    driver.finish(sequence)
    assert backend.num_copies == len(backend.packed)
    assert answer(sequence) == answer(plain)

    # Coming while steps run, one after the other.
    backend = ListedBackend(num_threads)
    driver = opened(directory, backend)
    maker = CopyMaker(backend, 0)
    sequence = driver.add(PROMPT, PARAMS)
    driver.finish(sequence)
    maker.join()
    assert answer(sequence) == answer(plain)


def test_closing_ends_what_has_not_begun(directory: Path) -> None:
    backend = ListedBackend(1)
    driver = opened(directory, backend)
    CopyMaker(backend, NEVER_S).close()
    driver.finish(driver.add(PROMPT, PARAMS))
    assert backend.num_copies == 0


def test_kernels_without_copies_have_no_thread_for_them() -> None:
    before = threading.active_count()
    makers = [CopyMaker(backend, NEVER_S) for backend in (ReferenceBackend(), CpuBackend(1))]
    assert threading.active_count() == before
    for maker in makers:
        maker.close()


def test_copies_without_memory_are_said_to_be_missing(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Poor(CpuBackend):
        def make_copies(self, goes_on: Callable[[], bool]) -> int:
            raise RuntimeError("you tried to allocate 7 bytes")

    backend = Poor(1)
    opened(directory, backend)
    with caplog.at_level(logging.WARNING):
        CopyMaker(backend, 0).join()
    assert "steps of few rows stay slower" in caplog.text
    assert "7 bytes" in caplog.text


def test_ranks_of_a_machine_share_what_is_spare() -> None:
    """So many ranks that a small matrix takes more than one's share."""
    many = 10 * free_memory_bytes() // 2**20
    taken = []
    for ranks in (ALONE, replace(ALONE, num_local_ranks=many)):
        backend = open_workplace(WorkerConfig(kernels="cpu", device="cpu"), ranks, num_cpus=1).backend
        backend.pack_linear(torch.ones(256, 512), None)
        taken.append(backend.info.copy_bytes)
    assert taken[0] > 0.7 * 256 * 512 * 2
    assert taken[1] == pytest.approx(2**20 / 10 / 16, rel=0.5)  # others take and free memory meanwhile


def test_a_worker_makes_them_and_ends_with_the_thread_that_does(directory: Path) -> None:
    config = WorkerConfig(
        model=str(directory), kernels="cpu", dtype="float32", num_kv_blocks=64, max_num_seqs=4, num_threads=1
    )
    loaded = load(config, Phases())
    assert "second copies" in [thread.name for thread in threading.enumerate()]
    loaded.close()
    assert "second copies" not in [thread.name for thread in threading.enumerate()]
