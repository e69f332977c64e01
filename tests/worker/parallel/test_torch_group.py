"""The group between processes, over gloo, against its twin of threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from octavo.ports import free_port
from tests.fakes.thread_group import ThreadGroup, on_ranks
from tests.worker.parallel.rank_program import input_of

pytestmark = pytest.mark.e2e

# Two ranks run in every test of worker processes.
NUM_RANKS = 4
DTYPES = (torch.float32, torch.bfloat16)


def process_ranks(num_ranks: int) -> list[dict[str, object]]:
    common = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "tests.worker.parallel.rank_program"]
    processes = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), **common},
        )
        for rank in range(num_ranks)
    ]
    try:
        return [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_processes_do_what_threads_do() -> None:
    def twin(group: ThreadGroup) -> dict[str, object]:
        found: dict[str, object] = {}
        for dtype in DTYPES:
            own = input_of(group.rank, dtype)
            found[f"sum {dtype}"] = group.all_reduce(own.clone()).tolist()
            columns = group.gather_columns(own[:, :3])
            found[f"columns {dtype}"] = None if columns is None else columns.tolist()
        return found

    expected = on_ranks(NUM_RANKS, twin)
    for rank, found in enumerate(process_ranks(NUM_RANKS)):
        for dtype in DTYPES:
            assert found[f"sum {dtype}"] == expected[rank][f"sum {dtype}"]
            # A row alone has the sum that it has among others.
            assert found[f"row sums {dtype}"] == found[f"sum {dtype}"]
            assert found[f"columns {dtype}"] == expected[rank][f"columns {dtype}"]
        assert found["told"] == [7, 0]
        assert found["minimum"] == [0, 1 - NUM_RANKS, 5]
        assert found["nothing"] == []
        assert found["waited"], rank


def test_the_order_of_addition_would_show() -> None:
    """The inputs would tell a sum in another order from the one that is promised."""
    parts = [input_of(rank, torch.float32) for rank in range(NUM_RANKS)]
    assert not torch.equal(parts[0] + parts[1] + parts[2] + parts[3], parts[3] + parts[2] + parts[1] + parts[0])
