"""Replicas of two processes against a scheduler on loopback: started by the worker or by a launcher, and their ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_file

from octavo.internal.v1 import worker_pb2
from octavo.ports import free_port
from tests.e2e.stack import children_of
from tests.fakes.attach_server import AttachedWorker, AttachServer, free_address, serving
from tests.fakes.tiny_llama import TinyLlama, random_tensors
from tests.fakes.token_sink import token_sink
from tests.worker.harness import greedy_alone, sampling
from worker_svc.runner import Runner

pytestmark = pytest.mark.e2e

# Processes that import torch on a machine that is busy with others.
LIMIT_S = 120.0
PROMPT = [5, 9, 200, 31]
NUM_TOKENS = 4
SIZES = ("--num-kv-blocks", "8", "--num-threads", "1", "--max-num-seqs", "2")


def start(model: Path, address: str, *options: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "octavo", "worker", str(model), "--scheduler-address", address, *SIZES, *options]
    return subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}
    )


@contextlib.contextmanager
def ended(*processes: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def greedy(worker: AttachedWorker, incarnation: int) -> list[int]:
    """The prompt's continuation by plans that follow each other without waiting, as the scheduler sends them."""
    admission = worker_pb2.Admission(
        slot=0,
        token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        block_ids=[0],
        sampling=sampling(max_tokens=NUM_TOKENS),
        router_id=1,
        stream_key=5,
        attempt=1,
    )
    for step in range(1, NUM_TOKENS + 1):
        start = 0 if step == 1 else len(PROMPT) + step - 2
        rows = {"row_slots": [0], "row_starts": [start], "row_counts": [len(PROMPT) if step == 1 else 1]}
        admissions = [admission] if step == 1 else []
        worker.tell(plan=worker_pb2.StepPlan(incarnation=incarnation, step=step, admissions=admissions, **rows))
    return [token for _ in range(NUM_TOKENS) for token in worker.result().token_ids]


def test_a_worker_starts_its_ranks_and_dies_with_any(tiny_directory: Path, tiny_runner: Runner) -> None:
    scheduler = AttachServer()
    with serving(scheduler, free_address()) as address, token_sink() as sink:
        process = start(tiny_directory, address, "--tensor-parallel-size", "2")
        with ended(process):
            worker = scheduler.attached()
            hello = worker.hello()
            worker.tell(router_endpoint=sink.router(1))
            expected = greedy_alone(tiny_runner, PROMPT, NUM_TOKENS)
            assert greedy(worker, hello.incarnation) == expected
            # A plan that disagrees with the rows empties both ranks, and both go on.
            worker.tell(plan=worker_pb2.StepPlan(incarnation=hello.incarnation, step=99))
            assert worker.hear() is None
            worker = scheduler.attached()
            hello = worker.hello()
            worker.tell(router_endpoint=sink.router(1))
            assert greedy(worker, hello.incarnation) == expected
            (other,) = children_of(process.pid)
            os.kill(other, signal.SIGKILL)
            _, log = process.communicate(timeout=LIMIT_S)
            assert worker.hear() is None
    assert process.returncode == 1
    last = log.splitlines()[-1]
    assert last.startswith(f"octavo worker: rank 1 (pid {other} on "), log
    assert "was killed by SIGKILL" in last


def test_a_launcher_may_start_the_ranks(tiny_directory: Path, tiny_runner: Runner) -> None:
    scheduler = AttachServer()
    with serving(scheduler, free_address()) as address, token_sink() as sink:
        common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        processes = [start(tiny_directory, address, RANK=str(rank), **common) for rank in (1, 0)]
        with ended(*processes):
            worker = scheduler.attached()
            hello = worker.hello()
            worker.tell(router_endpoint=sink.router(1))
            assert greedy(worker, hello.incarnation) == greedy_alone(tiny_runner, PROMPT, NUM_TOKENS)
            for process in processes:  # as launchers do
                process.send_signal(signal.SIGTERM)
            logs = [process.communicate(timeout=LIMIT_S)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], logs


def test_a_rank_that_cannot_load_is_named(tiny_directory: Path, tmp_path: Path) -> None:
    tensors = random_tensors(TinyLlama(num_layers=1))
    del tensors["model.norm.weight"]
    broken = shutil.copytree(tiny_directory, tmp_path / "broken")
    save_file(tensors, broken / "model.safetensors")
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    first = start(tiny_directory, "127.0.0.1:1", RANK="0", **common)
    second = start(broken, "127.0.0.1:1", RANK="1", **common)
    with ended(first, second):
        logs = [process.communicate(timeout=LIMIT_S)[1] for process in (first, second)]
    assert (first.returncode, second.returncode) == (1, 1), logs
    assert f"rank 1 (pid {second.pid} on " in logs[0].splitlines()[-1]
    assert "1 tensor missing from the checkpoint: model.norm.weight" in logs[0].splitlines()[-1]


def test_ranks_that_do_not_come_are_named(tiny_directory: Path) -> None:
    environment = {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment["MASTER_PORT"] = str(free_port())
    process = start(tiny_directory, "127.0.0.1:1", "--rendezvous-timeout", "1", **environment)
    with ended(process):
        _, log = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "1 of 4 ranks arrived within 1 s, missing: 1, 2, 3" in log.splitlines()[-1]
    assert "rank 0 (pid" in log
