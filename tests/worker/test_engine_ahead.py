"""The engine over a device that runs ahead: plans are launched as they come, results leave in order when done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue

import pytest

from octavo.internal.v1 import worker_pb2
from tests.fakes.attach_server import WAIT_S, AttachedWorker, AttachServer, free_address, serving
from tests.fakes.eager_device import EagerDevice, PaddedReference
from tests.fakes.scripted_model import ScriptedModel
from tests.fakes.token_sink import TokenSink, token_sink
from tests.worker.harness import RunnerShape, build_runner
from tests.worker.test_engine import HELLO, first_plan, next_plan
from worker_svc.attach import Inbox, SchedulerLink, Stop
from worker_svc.engine import Engine
from worker_svc.token_outlet import TokenOutlet


@dataclass(frozen=True)
class Ahead:
    """A worker's engine over the fake device, its scheduler and its router."""

    device: EagerDevice
    worker: AttachedWorker
    incarnation: int
    sink: TokenSink


@pytest.fixture
def ahead(parrot: ScriptedModel) -> Iterator[Ahead]:
    device = EagerDevice()
    runner = build_runner(parrot.directory, RunnerShape(device=device), backend=PaddedReference())
    scheduler, outlet = AttachServer(), TokenOutlet()
    inbox: Inbox = SimpleQueue()
    with serving(scheduler, free_address()) as address, token_sink() as sink:
        link = SchedulerLink(address, inbox)
        thread = threading.Thread(target=Engine(runner, outlet, inbox).run, args=(lambda: False,))
        link.start()
        thread.start()
        link.ready(HELLO)
        worker = scheduler.attached()
        hello = worker.hello()
        worker.tell(router_endpoint=sink.router(1))
        yield Ahead(device, worker, hello.incarnation, sink)
        device.num_reached = 10**9
        inbox.put(Stop())
        thread.join(WAIT_S)
        outlet.close()
        link.close()
    assert not thread.is_alive()


def until(condition: Callable[[], bool]) -> None:
    """Waits for another thread, as long as a slow machine may need."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.002)


def test_the_next_plan_is_launched_while_a_step_runs(ahead: Ahead, parrot: ScriptedModel) -> None:
    ahead.worker.tell(plan=first_plan(ahead.incarnation, parrot))
    ahead.worker.tell(plan=next_plan(ahead.incarnation, 2))
    until(lambda: ahead.device.num_marks == 2)
    assert ahead.device.num_reached == 0
    found = []
    for step in (1, 2):
        ahead.device.num_reached = step
        result = ahead.worker.result()
        assert result.step == step
        assert result.duration_ns > 0
        assert list(ahead.sink.next().token_ids) == list(result.token_ids)
        found += result.token_ids
    assert found == list(parrot.script_ids[:2])


def test_a_plan_that_disagrees_is_found_while_another_runs(ahead: Ahead, parrot: ScriptedModel) -> None:
    ahead.worker.tell(plan=first_plan(ahead.incarnation, parrot))
    until(lambda: ahead.device.num_marks == 1)
    ahead.worker.tell(plan=worker_pb2.StepPlan(incarnation=ahead.incarnation, step=7))
    # The attachment ends, and the step in flight with it.
    assert ahead.worker.hear() is None
