"""Memory of a GPU at start: what is measured, what the KV cache gets, which option an error names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.api import KVCacheSpec
from octavo.process import StartError
from tests.fakes.eager_device import EagerDevice, PaddedReference
from tests.fakes.fake_meter import FakeMeter
from tests.worker.harness import RunnerShape, build_runner
from worker_svc.config import WorkerConfig
from worker_svc.decode_graphs import graph_sizes
from worker_svc.device.choice import choose_device
from worker_svc.device.memory import CardMemory
from worker_svc.kv_cache import WorkerMemory, size_card_memory
from worker_svc.profiling import measure_steps
from worker_svc.rows import RowLimits
from worker_svc.runner import RunnerLimits, RunnerParts

GIB, MIB = 2**30, 2**20
BLOCK = 2 * MIB
# 80 GiB, of which 16 are this worker's weights and 4 somebody else's.
CARD = CardMemory(80 * GIB, 60 * GIB, 16 * GIB)


def size(config: WorkerConfig, card: CardMemory = CARD) -> WorkerMemory:
    return size_card_memory(config, BLOCK, card, workspace_bytes=2 * GIB, graph_bytes=GIB)


def test_the_cache_takes_what_the_share_leaves() -> None:
    memory = size(WorkerConfig(gpu_memory_utilization=0.5))
    assert memory.pool.num_bytes == (40 - 16 - 2 - 1) * GIB
    assert memory.pool.reason == "what --gpu-memory-utilization 0.5 leaves"
    assert (memory.others_bytes, memory.free_bytes) == (4 * GIB, (60 - 3 - 21) * GIB)


def test_what_others_hold_is_left_to_them() -> None:
    memory = size(WorkerConfig(gpu_memory_utilization=0.99))
    # And a fiftieth of the card to what nobody measures.
    assert 0 <= (60 - 3) * GIB - 80 * GIB // 50 - memory.pool.num_bytes < BLOCK
    assert memory.pool.reason == "what other processes leave free"


def test_a_given_size_counts_as_it_is() -> None:
    assert size(WorkerConfig(kv_cache_memory=5 * GIB)).pool.num_blocks == 5 * GIB // BLOCK
    assert size(WorkerConfig(num_kv_blocks=7)).pool.num_blocks == 7


@pytest.mark.parametrize(
    ("config", "card", "remedy"),
    [
        (WorkerConfig(kv_cache_memory=58 * GIB), CARD, r"use --kv-cache-memory 58368MiB or less$"),
        (WorkerConfig(num_kv_blocks=10**6), CARD, r"use --num-kv-blocks 29184 or less$"),
        (WorkerConfig(gpu_memory_utilization=0.2), CARD, r"use --gpu-memory-utilization 0.93, or lower --max-num-b"),
        (
            WorkerConfig(),
            CardMemory(80 * GIB, 2 * GIB, 16 * GIB),
            r"other processes 62.00 GiB; free memory of the card",
        ),
        (WorkerConfig(kv_cache_memory=GIB), CardMemory(80 * GIB, 2 * GIB, 16 * GIB), r"give --enforce-eager"),
    ],
)
def test_an_error_names_the_option_to_change(config: WorkerConfig, card: CardMemory, remedy: str) -> None:
    with pytest.raises(StartError, match=remedy):
        size(config, card)


class Noting(PaddedReference):
    """Notes the longest context of each plan and the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.planned: list[tuple[int, int]] = []

    def plan_attention(self, batch, cache):  # type: ignore[no-untyped-def]
        self.planned.append((batch.max_context_len, batch.num_tokens))
        return super().plan_attention(batch, cache)


def test_the_largest_step_and_the_graphs_are_measured(tiny_directory: Path) -> None:
    """On a scratch cache: the real one does not exist yet."""
    device, backend = EagerDevice(), Noting()
    built = build_runner(tiny_directory, RunnerShape(device=device), backend=backend)
    decoder = built._head._decoder
    rows = RowLimits(num_slots=6, max_model_len=128, block_size=4, num_blocks=0, vocab_size=257)
    own = decoder.config
    spec = KVCacheSpec(own.num_layers, 0, 4, own.num_kv_heads, own.head_dim, torch.float32)
    made: list[KVCacheSpec] = []

    def parts(spec: KVCacheSpec) -> RunnerParts:
        made.append(spec)
        return RunnerParts(decoder, backend, backend.allocate_kv_cache(spec), device=device, graph_rows=graph_sizes(6))

    meter = FakeMeter(CARD, peak=123, kept=(1000, 1080))
    found = measure_steps(meter, parts, spec, RunnerLimits(rows, max_step_tokens=60))
    # Ten tokens for each of six rows, in three blocks that all share.
    assert [each.num_blocks for each in made] == [3]
    # The last tokens of the first row's blocks, of which there are as many as a sequence can have.
    assert backend.planned[0] == (4 * 29 + 10, 60)
    assert found.workspace_bytes == 123
    # Sizes 1, 2, 4, 6: the first takes 1000, two more 80 together.
    assert found.graph_bytes == 1000 + 3 * 40
    # The largest first: the others find room in what it took.
    assert [num_tokens for _, num_tokens in backend.planned[2:]] == [6, 6, 4, 2]
    assert device.num_graphs == 1 + 3
    assert meter.num_works == 3


def test_a_rank_takes_the_device_of_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("cpu", 1) == torch.device("cpu")
    assert choose_device("auto", 1, num_visible=2) == torch.device("cuda", 1)
    assert choose_device("cuda:2", 1, num_visible=4) == torch.device("cuda", 3)
    with pytest.raises(StartError, match=r"rank 1 of this machine needs CUDA device 1, torch .* sees 1"):
        choose_device("cuda", 1, num_visible=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(StartError, match=r"sees 1 \(CUDA_VISIBLE_DEVICES=3\)"):
        choose_device("cuda", 1, num_visible=1)
    with pytest.raises(StartError, match="give --device cpu"):
        choose_device("cuda", 0, num_visible=0)
