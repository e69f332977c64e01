"""The worker as a process: `octavo worker` against a scheduler on loopback, from its first word to its last."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.internal.v1 import worker_pb2
from tests.fakes.attach_server import WAIT_S, AttachedWorker, AttachServer, free_address, serving
from tests.fakes.scripted_model import ScriptedModel
from tests.fakes.token_sink import token_sink
from tests.worker.harness import sampling

pytestmark = pytest.mark.e2e


def start_worker(model: Path, address: str, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "octavo", "worker", str(model), "--scheduler-address", address, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def phases_until_hello(worker: AttachedWorker) -> Iterator[str]:
    while (request := worker.hear()) is not None:
        if request.WhichOneof("message") == "hello":
            yield f"hello {request.hello.incarnation}"
            return
        yield request.starting.phase.name


def test_a_worker_starts_answers_and_ends(parrot: ScriptedModel) -> None:
    scheduler = AttachServer()
    with serving(scheduler, free_address()) as address, token_sink() as sink:
        process = start_worker(parrot.directory, address, "--num-kv-blocks", "8", "--num-threads", "1")
        try:
            worker = scheduler.attached()
            *phases, hello = dict.fromkeys(phases_until_hello(worker))
            assert phases == ["import", "model", "tokenizer", "weights", "kv", "warm-up"]
            worker.tell(router_endpoint=sink.router(1))
            admission = worker_pb2.Admission(
                slot=0,
                token_ids=[parrot.trigger_id],
                num_prompt_tokens=1,
                block_ids=[0],
                sampling=sampling(),
                router_id=1,
                stream_key=5,
                attempt=1,
            )
            incarnation = int(hello.removeprefix("hello "))
            rows = {"row_slots": [0], "row_starts": [0], "row_counts": [1]}
            worker.tell(plan=worker_pb2.StepPlan(incarnation=incarnation, step=1, admissions=[admission], **rows))
            assert list(worker.result().token_ids) == [parrot.script_ids[0]]
            assert list(sink.next().token_ids) == [parrot.script_ids[0]]
            process.send_signal(signal.SIGTERM)
            assert worker.hear() is None
            _, log = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "KV cache" in log
    assert "8 blocks of 16 tokens" in log


def test_a_worker_may_be_stopped_while_it_starts(parrot: ScriptedModel) -> None:
    scheduler = AttachServer()
    with serving(scheduler, free_address()) as address:
        process = start_worker(parrot.directory, address)
        try:
            worker = scheduler.attached()
            assert worker.hear() is not None
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
    assert process.returncode == 0


def test_what_stops_a_start_is_the_last_line(tmp_path: Path) -> None:
    process = start_worker(tmp_path / "absent", "127.0.0.1:1")
    _, log = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert "absent" in log.splitlines()[-1]


def test_the_first_word_needs_nothing_heavy() -> None:
    code = (
        "import sys, worker_svc.server\n"
        "print(sorted({'torch', 'numpy', 'tokenizers', 'zmq', 'transformers'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
