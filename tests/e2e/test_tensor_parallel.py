"""Two replicas of two ranks each: they answer as one process would, and the death of a rank is survived."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from octavo import Client
from tests.e2e.stack import Stack, children_of, eventually, serving
from tests.fakes.tiny_llama import TINY_VOCAB_SIZE, TinyLlama, write_tiny_llama
from tests.fakes.tiny_tokenizers import tiny_tokenizer
from tests.worker.harness import RunnerShape, build_runner, greedy_alone

PROMPT = "Once upon a time"
NUM_TOKENS = 400
SIZES = ("--num-kv-blocks", "64", "--max-num-seqs", "4")

pytestmark = pytest.mark.e2e


def running_leader(stack: Stack) -> int:
    """The process id of rank 0 of the replica that computes something; a replica's name is host:pid."""
    (replica,) = (replica for replica in stack.replicas() if replica.num_running)
    return int(replica.name.rpartition(":")[2])


def test_ranks_and_replicas_answer_as_one_process_and_are_replaced(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path, TinyLlama())
    sampling: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    ranks = ("--tensor-parallel-size", "2", "--data-parallel-size", "2")
    with serving(str(model), *SIZES, *ranks) as stack:
        with Client(stack.grpc) as client:
            undisturbed = client.generate(PROMPT, **sampling)
            ids: list[int] = []
            stream = client.generate(PROMPT, **sampling, stream=True)
            for delta in stream:
                if len(ids) <= 20 < len(ids) + len(delta.token_ids):
                    (rank,) = children_of(running_leader(stack))
                    os.kill(rank, signal.SIGKILL)
                ids += delta.token_ids
        eventually(lambda: len(stack.replicas()) == 2, 120, "the replica has been replaced")
        leader = int(stack.replicas()[0].name.rpartition(":")[2])
        (follower,) = children_of(leader)
        os.kill(leader, signal.SIGKILL)
        eventually(lambda: not Path(f"/proc/{follower}").exists(), 60, "the other rank has ended with the first")
        assert stack.stop() == 0, stack.log
    assert ids == list(undisturbed.choices[0].token_ids)
    assert stream.result.choices[0].receipt.attempts > 1
    assert f"rank 1 (pid {rank} on " in stack.log
    shape = RunnerShape(vocab_size=TINY_VOCAB_SIZE, max_model_len=512, num_blocks=128)
    assert ids[:16] == greedy_alone(build_runner(model, shape), tiny_tokenizer([]).encode(PROMPT).ids, 16)
