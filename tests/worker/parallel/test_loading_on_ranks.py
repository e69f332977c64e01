"""The start of a replica of two ranks: what they agree on, and what ends it where they cannot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.phases import Phases
from octavo.process import StartError
from tests.fakes.thread_group import ThreadGroup, on_ranks
from tests.fakes.tiny_llama import TinyLlama, write_tiny_llama
from worker_svc.config import WorkerConfig
from worker_svc.loading import LoadedWorker, load
from worker_svc.parallel.group import Membership

CONFIG = WorkerConfig(kv_cache_memory=2**18, swap_space=2**-12, max_num_seqs=4, kernels="reference", num_threads=1)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three KV heads: of two ranks the second has two."""
    shape = TinyLlama(num_layers=1, num_heads=6, num_kv_heads=3)
    return write_tiny_llama(tmp_path_factory.mktemp("uneven"), shape)


def start(model: Path, **of_rank_1: Any) -> list[LoadedWorker]:
    def one(group: ThreadGroup) -> LoadedWorker:
        own = replace(CONFIG, model=str(model), **(of_rank_1 if group.rank else {}))
        return load(own, Phases(), Membership(group, group.size))

    return on_ranks(2, one)


def test_every_rank_has_the_blocks_of_the_one_with_the_least_room(uneven: Path) -> None:
    first, second = (worker.hello for worker in start(uneven))
    # A block of two heads in fp32: keys and values, 16 tokens of 16 dimensions.
    block_bytes = 2 * 2 * 16 * 16 * 4
    assert first.num_device_blocks == second.num_device_blocks == 2**18 // block_bytes
    assert first.num_host_blocks == second.num_host_blocks == 2**18 // block_bytes
    # Each rank timed its own warm-up.
    first.warm_up_token_ns = second.warm_up_token_ns = 0
    assert first == second


def test_the_number_of_ranks_is_part_of_the_numerics(uneven: Path) -> None:
    alone = load(replace(CONFIG, model=str(uneven)), Phases()).hello.model
    shared = start(uneven)[0].hello.model
    assert shared.numerics != alone.numerics
    assert shared.batch_invariant
    shared.numerics = alone.numerics
    assert shared == alone


# Of two that add up differently, or run different graphs, each would wait for the other without end.
OTHERS = (
    {"max_num_seqs": 5},
    {"dtype": "bfloat16"},
    {"swap_space": 0},
    {"batch_invariant": True},
    {"enforce_eager": True},
)


@pytest.mark.parametrize("option", OTHERS, ids=str)
def test_ranks_that_were_told_different_things_do_not_start(uneven: Path, option: dict[str, Any]) -> None:
    with pytest.raises(StartError, match=r"the 2 ranks do not agree; .* Rank [01] has "):
        start(uneven, **option)


def test_a_model_that_two_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path, TinyLlama(num_layers=1, intermediate_size=97))
    with pytest.raises(StartError, match=r"--tensor-parallel-size 2: intermediate_size 97 is not a multiple of 2"):
        start(model)
