"""The start on a GPU, on one that is not there: measured, sized, captured and proven through the same code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from octavo.phases import Phase, Phases
from octavo.process import StartError
from tests.fakes.eager_device import EagerDevice, PaddedReference
from tests.fakes.fake_meter import FakeMeter
from worker_svc.config import WorkerConfig
from worker_svc.device.memory import CardMemory
from worker_svc.device.workplace import Workplace, open_workplace
from worker_svc.loading import LoadedWorker, load
from worker_svc.parallel.group import ALONE, Membership

GIB = 2**30
CONFIG = WorkerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, num_threads=1, device="cuda")


class Start:
    """One start of a worker on the fake card."""

    def __init__(self, directory: Path, config: WorkerConfig, card: CardMemory) -> None:
        self.device, self.meter = EagerDevice(), FakeMeter(card, peak=GIB, kept=(GIB // 4, GIB // 4))
        self.seen: list[Phase] = []
        self._config = replace(config, model=str(directory))

    def load(self) -> LoadedWorker:
        return load(self._config, Phases(self.seen.append), open_place=self._open)

    def _open(self, config: WorkerConfig, ranks: Membership, num_cpus: int) -> Workplace:
        return Workplace(self.device, PaddedReference(1), self.meter)


def test_a_card_is_measured_before_its_cache_is_sized(tiny_directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    start = Start(tiny_directory, replace(CONFIG, num_kv_blocks=12), CardMemory(8 * GIB, 6 * GIB, GIB))
    loaded = start.load()
    assert loaded.threads is None
    # One more is the fake kernels' own, for padding rows.
    assert loaded.hello.num_device_blocks == 12 + 1
    names = list(dict.fromkeys(phase.name for phase in start.seen))
    assert names == ["model", "tokenizer", "device", "weights", "kv", "warm-up"]
    # Sizes 1, 2, 4 twice: the largest alone and all three to measure, all three to serve.
    assert start.device.num_graphs == 1 + 3 + 3
    assert start.meter.num_works == 3
    (table,) = (message for message in caplog.messages if message.startswith("memory"))
    assert "CUDA graphs" in table
    assert "other processes    1.00 GiB" in table


def test_eager_steps_need_no_graphs(tiny_directory: Path) -> None:
    config = replace(CONFIG, enforce_eager=True, kv_cache_memory=2**20)
    start = Start(tiny_directory, config, CardMemory(8 * GIB, 6 * GIB, GIB))
    start.load()
    assert start.device.num_graphs == 0


def test_a_full_card_stops_the_start(tiny_directory: Path) -> None:
    with pytest.raises(StartError, match=r"other processes 6.50 GiB; free memory of the card"):
        Start(tiny_directory, CONFIG, CardMemory(8 * GIB, GIB // 2, GIB)).load()


def test_kernels_of_the_cpu_are_refused_for_a_card() -> None:
    with pytest.raises(StartError, match=r"needs CUDA device 0|give --device cpu"):
        open_workplace(replace(CONFIG, kernels="reference"), ALONE, 1)
