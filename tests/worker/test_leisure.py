"""What is done beside the steps: second copies of weights, in use from some step on with no bit another for it, and
memory of the KV cache ahead of its use.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.api import KVCache, KVCacheSpec, PackedLinear
from kernels.cpu import CpuBackend, unavailable_reason
from kernels.cpu.products import CpuLinear
from kernels.reference import ReferenceBackend
from octavo.machine import free_memory_bytes
from octavo.phases import Phases
from tests.fakes.tiny_llama import TINY_VOCAB_SIZE, TinyLlama, write_tiny_llama
from tests.worker.harness import Driver, RunnerShape, answer, build_runner, sampling
from worker_svc.config import WorkerConfig
from worker_svc.device.workplace import open_workplace
from worker_svc.leisure import LeisureThread, begin_leisure, find_memory, make_copies
from worker_svc.loading import load
from worker_svc.parallel.group import ALONE

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason="the kernels that make copies are not there")

NEVER_S = 1e6
SPEC = KVCacheSpec(1, 8, 16, 1, 16, torch.float32)
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
    make_copies(backend, threading.Event())
    driver.finish(sequence)
    assert backend.num_copies == len(backend.packed)
    assert answer(sequence) == answer(plain)

    # Coming while steps run, one after the other.
    backend = ListedBackend(num_threads)
    driver = opened(directory, backend)
    maker = LeisureThread("second copies", partial(make_copies, backend), 0)
    sequence = driver.add(PROMPT, PARAMS)
    driver.finish(sequence)
    maker.join()
    assert answer(sequence) == answer(plain)


def test_closing_ends_what_has_not_begun(directory: Path) -> None:
    backend = ListedBackend(1)
    driver = opened(directory, backend)
    LeisureThread("second copies", partial(make_copies, backend), NEVER_S).close()
    driver.finish(driver.add(PROMPT, PARAMS))
    assert backend.num_copies == 0


def test_kernels_have_threads_for_what_they_offer_alone(directory: Path) -> None:
    before = threading.active_count()
    assert begin_leisure(ReferenceBackend(), ReferenceBackend().allocate_kv_cache(SPEC), 0, NEVER_S) == ()
    assert threading.active_count() == before
    backend = CpuBackend(1)
    for has_copies in (False, True):
        threads = begin_leisure(backend, backend.allocate_kv_cache(SPEC), 0, NEVER_S)
        assert len(threads) == 1 + has_copies
        for thread in threads:
            thread.close()
        opened(directory, backend)


def test_memory_is_looked_for_again_and_again_until_the_worker_ends() -> None:
    closing = threading.Event()
    asked: list[tuple[KVCache, int, bool]] = []

    class Listed:
        def find_memory(self, cache: KVCache, num_bytes: int, goes_on: Callable[[], bool]) -> None:
            asked.append((cache, num_bytes, goes_on()))
            if len(asked) == 2:
                closing.set()
                assert not goes_on()

    cache = ReferenceBackend().allocate_kv_cache(SPEC)
    find_memory(Listed(), cache, 7, closing)
    assert asked == [(cache, 7, True)] * 2


def test_copies_without_memory_are_said_to_be_missing(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Poor(CpuBackend):
        def make_copies(self, goes_on: Callable[[], bool]) -> int:
            raise RuntimeError("you tried to allocate 7 bytes")

    backend = Poor(1)
    opened(directory, backend)
    with caplog.at_level(logging.WARNING):
        make_copies(backend, threading.Event())
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
    assert threads_of_leisure() == {"second copies", "memory ahead"}
    loaded.close()
    assert not threads_of_leisure()


def threads_of_leisure() -> set[str]:
    return {thread.name for thread in threading.enumerate()} & {"second copies", "memory ahead"}
