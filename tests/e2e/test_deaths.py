"""Processes die in the middle of streams, and the streams go on with the same text."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo import Client
from octavo.client import Unavailable
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


def kill(stack: Stack, service: str, signum: int = signal.SIGKILL) -> None:
    os.kill(stack.pid_of(service), signum)


@pytest.mark.parametrize("service", ["worker", "scheduler"])
@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "seeded"])
def test_a_stream_survives_kill_9(mortal: Stack, service: str, sampling: dict[str, float]) -> None:
    check_survival(mortal, service, sampling, signal.SIGKILL)


def test_f46_a_worker_that_is_asked_to_end_gives_its_streams_away(mortal: Stack) -> None:
    check_survival(mortal, "worker", SAMPLING[1], signal.SIGTERM)


def check_survival(mortal: Stack, service: str, sampling: dict[str, float], signum: int) -> None:
    """A stream in whose middle a process gets a signal goes on with the same text."""
    mortal.wait_until_ready()
    with Client(mortal.grpc) as client:
        undisturbed = client.generate(PROMPT, **OPTIONS, **sampling)
        ids: list[int] = []
        text = ""
        stream = client.generate(PROMPT, **OPTIONS, **sampling, stream=True)
        for delta in stream:
            assert delta.start_index == len(ids) or not delta.token_ids
            if len(ids) <= 20 < len(ids) + len(delta.token_ids):
                kill(mortal, service, signum)
            ids += delta.token_ids
            text += delta.text
    assert ids == list(undisturbed.choices[0].token_ids)
    assert text == undisturbed.text
    assert stream.result.choices[0].receipt.attempts > 1


def test_f44_readiness_follows_the_worker(mortal: Stack) -> None:
    mortal.wait_until_ready()
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    with grpc.insecure_channel(mortal.grpc) as channel, Client(mortal.grpc) as client:
        health: Any = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=120)
        assert next(watch).status == serving
        kill(mortal, "worker")
        eventually(lambda: mortal.ready()[0] == 503, 2.0, "not ready while the worker is dead")
        with pytest.raises(Unavailable, match="no replica of"):
            client.generate(PROMPT)
        assert health.Check(health_pb2.HealthCheckRequest()).status == not_serving
        assert [next(watch).status, next(watch).status] == [not_serving, serving]
    mortal.wait_until_ready()


def test_f44_a_worker_that_stands_still_is_not_ready_until_it_goes_on(mortal: Stack) -> None:
    """Its connection lives and it does nothing: SIGSTOP in the middle of a stream, then SIGCONT."""
    mortal.wait_until_ready()
    with Client(mortal.grpc) as client:
        undisturbed = client.generate(PROMPT, **OPTIONS, temperature=0)
        stream = client.generate(PROMPT, **OPTIONS, temperature=0, stream=True)
        deltas = iter(stream)
        text = next(deltas).text
        kill(mortal, "worker", signal.SIGSTOP)
        try:
            eventually(lambda: mortal.ready()[0] == 503, 60.0, "not ready while the worker stands still")
            with pytest.raises(Unavailable, match="no replica of"):
                client.generate(PROMPT)
        finally:
            kill(mortal, "worker", signal.SIGCONT)
        text += "".join(delta.text for delta in deltas)
    assert text == undisturbed.text
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
    assert PROMPT not in mortal.log, "F72: nor by deaths of processes"
