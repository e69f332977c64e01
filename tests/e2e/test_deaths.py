"""Processes die in the middle of streams, and the streams go on with the same text."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from octavo import Client
from tests.e2e.conftest import SMALL_POOL
from tests.e2e.stack import Stack, eventually, serving

PROMPT = "The history of the sea begins"
OPTIONS = {"max_tokens": 160, "ignore_eos": True}
SAMPLING = [{"temperature": 0}, {"temperature": 1.0, "seed": 11}]


@pytest.fixture(scope="module")
def mortal() -> Iterator[Stack]:
    """A stack of its own: its processes get killed."""
    with serving("default", *SMALL_POOL) as running:
        yield running


def kill(stack: Stack, service: str) -> None:
    os.kill(stack.pid_of(service), signal.SIGKILL)


@pytest.mark.parametrize("service", ["worker", "scheduler"])
@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "seeded"])
def test_a_stream_survives_kill_9(mortal: Stack, service: str, sampling: dict[str, float]) -> None:
    mortal.wait_until_ready()
    with Client(mortal.grpc) as client:
        undisturbed = client.generate(PROMPT, **OPTIONS, **sampling)
        ids: list[int] = []
        text = ""
        stream = client.generate(PROMPT, **OPTIONS, **sampling, stream=True)
        for delta in stream:
            assert delta.start_index == len(ids) or not delta.token_ids
            if len(ids) <= 20 < len(ids) + len(delta.token_ids):
                kill(mortal, service)
            ids += delta.token_ids
            text += delta.text
    assert ids == list(undisturbed.choices[0].token_ids)
    assert text == undisturbed.text
    assert stream.result.choices[0].receipt.attempts > 1


def test_f44_readiness_follows_the_worker(mortal: Stack) -> None:
    mortal.wait_until_ready()
    kill(mortal, "worker")
    eventually(lambda: mortal.ready()[0] == 503, 2.0, "not ready while the worker is dead")
    mortal.wait_until_ready()


def test_f46_one_ctrl_c_drains(mortal: Stack) -> None:
    mortal.wait_until_ready()
    got: list[int] = []
    started = threading.Event()

    def stream() -> None:
        with Client(mortal.grpc) as client:
            for delta in client.generate(PROMPT, **OPTIONS, temperature=0, stream=True):
                got.extend(delta.token_ids)
                started.set()

    reader = threading.Thread(target=stream)
    reader.start()
    assert started.wait(60)
    assert mortal.stop() == 0, mortal.log
    reader.join(10)
    assert len(got) == OPTIONS["max_tokens"]
