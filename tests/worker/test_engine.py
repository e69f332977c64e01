"""The engine and its link to the scheduler: a real gRPC server and a real token socket, a parrot for a model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue

import pytest

from octavo.internal.v1 import scheduler_pb2, types_pb2, worker_pb2
from tests.fakes.attach_server import WAIT_S, AttachedWorker, AttachServer, free_address, serving
from tests.fakes.scripted_model import ScriptedModel
from tests.fakes.token_sink import TokenSink, token_sink
from tests.worker.harness import sampling
from worker_svc.attach import Inbox, SchedulerLink, Stop
from worker_svc.engine import Engine, InFlight
from worker_svc.runner import Runner
from worker_svc.token_outlet import TokenOutlet

HELLO = worker_pb2.Hello(name="worker", num_slots=8, block_size=4)


@dataclass(frozen=True)
class Stack:
    """A worker's threads with everything around them."""

    scheduler: AttachServer
    link: SchedulerLink
    inbox: Inbox
    engine_thread: threading.Thread
    sink: TokenSink


@pytest.fixture
def stack(parrot_runner: Runner) -> Iterator[Stack]:
    scheduler, outlet = AttachServer(), TokenOutlet()
    inbox: Inbox = SimpleQueue()
    engine = Engine(parrot_runner, outlet, inbox)
    with serving(scheduler, free_address()) as address, token_sink() as sink:
        link = SchedulerLink(address, inbox)
        thread = threading.Thread(target=engine.run, args=(lambda: False,))
        link.start()
        thread.start()
        yield Stack(scheduler, link, inbox, thread, sink)
        inbox.put(Stop())
        thread.join(WAIT_S)
        outlet.close()
        link.close()
    assert not thread.is_alive()


def ready(stack: Stack) -> tuple[AttachedWorker, int]:
    """An attached worker that has said Hello and knows router 1; with its incarnation."""
    stack.link.ready(HELLO)
    worker = stack.scheduler.attached()
    hello = worker.hello()
    worker.tell(router_endpoint=stack.sink.router(1))
    return worker, hello.incarnation


def first_plan(incarnation: int, parrot: ScriptedModel, **changes: object) -> worker_pb2.StepPlan:
    admission = worker_pb2.Admission(
        slot=0,
        token_ids=[parrot.trigger_id],
        num_prompt_tokens=1,
        block_ids=[0, 1],
        sampling=sampling(end_token_ids=[parrot.end_id]),
        router_id=1,
        stream_key=77,
        attempt=2,
    )
    values: dict[str, object] = {"admissions": [admission], "row_slots": [0], "row_starts": [0], "row_counts": [1]}
    return worker_pb2.StepPlan(incarnation=incarnation, step=1, **{**values, **changes})  # type: ignore[arg-type]


def next_plan(incarnation: int, step: int) -> worker_pb2.StepPlan:
    return worker_pb2.StepPlan(incarnation=incarnation, step=step, row_slots=[0], row_starts=[step - 1], row_counts=[1])


def test_a_sequence_runs_to_its_end_with_plans_two_deep(stack: Stack, parrot: ScriptedModel) -> None:
    worker, incarnation = ready(stack)
    worker.tell(plan=first_plan(incarnation, parrot))
    num_steps = len(parrot.script_ids)
    found: list[int] = []
    for step in range(1, num_steps + 1):
        # The plan after the last one is made before its result is known, as at depth two.
        worker.tell(plan=next_plan(incarnation, step + 1))
        result = worker.result()
        assert (result.incarnation, result.step, list(result.undelivered_rows)) == (incarnation, step, [])
        assert result.duration_ns > 0
        # The tokens left before the result did.
        batch = stack.sink.next()
        assert (list(batch.stream_keys), list(batch.attempts), list(batch.positions)) == ([77], [2], [step - 1])
        assert list(batch.token_ids) == list(result.token_ids)
        found += batch.token_ids
    assert found == list(parrot.script_ids[:-1])
    assert list(batch.finish_reasons) == [types_pb2.FINISH_REASON_END_TOKEN]
    assert list(batch.final_token_ids) == [parrot.end_id]
    surplus = worker.result()
    assert (list(surplus.num_sampled), list(surplus.finish_reasons)) == ([0], [0])


def test_the_phases_of_the_start_come_before_hello(parrot_runner: Runner) -> None:
    """Also when the scheduler comes up late: it hears where the start is, not where it was."""
    scheduler, address = AttachServer(), free_address()
    inbox: Inbox = SimpleQueue()
    link = SchedulerLink(address, inbox)
    link.start()
    for name in ("import", "weights"):
        link.report(scheduler_pb2.WorkerStarting(name="worker", phase=types_pb2.StartPhase(name=name)))
    with serving(scheduler, address):
        heard = scheduler.attached().hear()
        while heard is None:  # an attempt that the server's start cut off
            heard = scheduler.attached().hear()
        assert heard.starting.phase.name == "weights"
        link.close()


def test_a_lost_scheduler_means_a_new_incarnation_and_no_rows(parrot_runner: Runner, parrot: ScriptedModel) -> None:
    address = free_address()
    inbox: Inbox = SimpleQueue()
    link, outlet = SchedulerLink(address, inbox), TokenOutlet()
    thread = threading.Thread(target=Engine(parrot_runner, outlet, inbox).run, args=(lambda: False,))
    link.ready(HELLO)
    link.start()
    thread.start()
    incarnations = []
    with token_sink() as sink:
        for _ in range(2):
            scheduler = AttachServer()
            with serving(scheduler, address):
                worker = scheduler.attached()
                incarnations.append(worker.hello().incarnation)
                worker.tell(router_endpoint=sink.router(1))
                # The same slot and blocks both times: the second worker has forgotten the first one's row.
                worker.tell(plan=first_plan(incarnations[-1], parrot))
                assert list(worker.result().token_ids) == [parrot.script_ids[0]]
                assert list(sink.next().token_ids) == [parrot.script_ids[0]]
        inbox.put(Stop())
        thread.join(WAIT_S)
        outlet.close()
        link.close()
    assert incarnations[0] != incarnations[1]


@pytest.mark.parametrize(
    "wrong",
    [{"row_starts": [1]}, {"step": 2}, {"incarnation": 1}, {"row_slots": [5]}],
    ids=["start", "step", "incarnation", "slot"],
)
def test_a_plan_that_disagrees_ends_the_connection(
    stack: Stack, parrot: ScriptedModel, wrong: dict[str, object]
) -> None:
    worker, incarnation = ready(stack)
    plan = first_plan(incarnation, parrot)
    for name, value in wrong.items():
        if isinstance(value, list):
            plan.ClearField(name)  # type: ignore[arg-type]
            getattr(plan, name).extend(value)
        else:
            setattr(plan, name, value)
    worker.tell(plan=plan)
    assert worker.hear() is None
    again = stack.scheduler.attached()
    assert again.hello().incarnation != incarnation


def test_an_unannounced_router_ends_the_connection(stack: Stack, parrot: ScriptedModel) -> None:
    stack.link.ready(HELLO)
    worker = stack.scheduler.attached()
    worker.tell(plan=first_plan(worker.hello().incarnation, parrot))
    assert worker.hear() is None
    assert stack.scheduler.attached().hello()


def test_tokens_of_a_router_that_is_gone_are_reported(stack: Stack, parrot: ScriptedModel) -> None:
    worker, incarnation = ready(stack)
    worker.tell(plan=first_plan(incarnation, parrot))
    assert list(worker.result().undelivered_rows) == []
    worker.tell(router_gone=1)
    worker.tell(plan=next_plan(incarnation, 2))
    result = worker.result()
    assert list(result.undelivered_rows) == [0]
    assert list(result.token_ids) == [parrot.script_ids[1]]


@dataclass
class Failing:
    """A runner with a defect, in the step of this number."""

    inner: Runner
    step: int

    @property
    def num_live_rows(self) -> int:
        return self.inner.num_live_rows

    def reset(self) -> None:
        self.inner.reset()

    def launch(self, plan: worker_pb2.StepPlan) -> InFlight:
        if plan.step == self.step:
            raise ZeroDivisionError("a defect")
        return self.inner.launch(plan)


def test_f44_a_defect_in_a_step_ends_the_loop_and_the_connection(parrot_runner: Runner, parrot: ScriptedModel) -> None:
    """No loop that goes on half, none that hangs while pings are answered: the process ends, and is seen to be gone."""
    scheduler, outlet = AttachServer(), TokenOutlet()
    inbox: Inbox = SimpleQueue()
    engine, raised = Engine(Failing(parrot_runner, step=2), outlet, inbox), SimpleQueue[BaseException]()

    def run(link: SchedulerLink) -> None:
        """As the process does it."""
        try:
            engine.run(lambda: False)
        except ZeroDivisionError as error:
            raised.put(error)
        finally:
            link.close()

    with serving(scheduler, free_address()) as address, token_sink() as sink:
        link = SchedulerLink(address, inbox)
        thread = threading.Thread(target=run, args=(link,))
        link.start()
        thread.start()
        worker, incarnation = ready(Stack(scheduler, link, inbox, thread, sink))
        worker.tell(plan=first_plan(incarnation, parrot))
        assert worker.result().step == 1
        worker.tell(plan=next_plan(incarnation, 2))
        assert str(raised.get(timeout=WAIT_S)) == "a defect"
        assert worker.hear() is None
        thread.join(WAIT_S)
        outlet.close()
