"""The step loop: receive a plan, run it, publish its tokens, answer. One thread, from the inbox's first event to Stop.

Knows the order of things (tokens are published before the result is sent) and what a lost attachment means: every row
and every cached block is void. Knows neither how plans arrive nor how they are computed.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty
from typing import Protocol

from octavo.internal.v1 import scheduler_pb2, worker_pb2
from worker_svc.attach import Attachment, Event, Inbox, Lost, Opened, Received, Stop
from worker_svc.messages import step_result, token_batches
from worker_svc.observers import Observer, Step
from worker_svc.outcome import StepOutcome
from worker_svc.rows import PlanError
from worker_svc.threads import StepThreads
from worker_svc.token_outlet import TokenOutlet

_LOG = logging.getLogger(__name__)


# How often a step on the device is looked after while nothing else comes in.
_POLL_S = 0.0002


class InFlight(Protocol):
    """A step that was launched."""

    def is_done(self) -> bool:
        """Whether `result` would not wait."""
        ...

    def result(self) -> StepOutcome:
        """Waits for it. Raises PlanError when the plan turns out to disagree with the rows."""
        ...


class StepRunner(Protocol):
    """What executes plans: `worker_svc.runner.Runner`, or a simulated one."""

    @property
    def num_live_rows(self) -> int:
        """Rows that have not ended."""
        ...

    def reset(self) -> None:
        """Forgets every row and expects step 1 next."""
        ...

    def launch(self, plan: worker_pb2.StepPlan) -> InFlight:
        """Begins one step. Raises PlanError when the plan disagrees with the rows."""
        ...


@dataclass(frozen=True)
class _Running:
    """A plan whose step was launched, and when."""

    plan: worker_pb2.StepPlan
    flight: InFlight
    begun_ns: int


class Engine:
    """Owns the runner and the outlet. Every method runs in the step thread."""

    def __init__(
        self,
        runner: StepRunner,
        outlet: TokenOutlet,
        inbox: Inbox,
        threads: StepThreads | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._runner = runner
        self._outlet = outlet
        self._inbox = inbox
        self._threads = threads
        self._observers = tuple(observers)
        self._attachment: Attachment | None = None
        # Launched and not published, in order; on a device that does not run ahead there is never one between events.
        self._running: deque[_Running] = deque()
        self._last_ended_ns = 0

    def run(self, is_draining: Callable[[], bool]) -> None:
        """Handles events until the process is asked to end; the running step is finished and answered."""
        while not is_draining():
            event = self._next_event()
            if isinstance(event, Stop):
                break
            if event is not None:
                self.handle(event)
        while self._running:
            self._publish_first()

    def _next_event(self) -> Event | None:
        """The next event. While steps run, None once the first of them has been published."""
        while self._running:
            if self._running[0].flight.is_done():
                self._publish_first()
                return None
            try:
                return self._inbox.get(timeout=_POLL_S)
            except Empty:
                continue
        return self._inbox.get()

    def handle(self, event: Event) -> None:
        """One event. Those of an attachment other than the present one are dropped."""
        match event:
            case Opened(attachment):
                self._begin(attachment)
            case Received(attachment, response) if attachment is self._attachment:
                self._receive(attachment, response)
            case Lost(attachment) if attachment is self._attachment:
                self._forget()
            case _:
                pass

    def _begin(self, attachment: Attachment) -> None:
        self._forget()
        self._attachment = attachment
        for observer in self._observers:
            observer.attached()

    def _forget(self) -> None:
        """The scheduler knows nothing of this worker any more, so the worker knows nothing either."""
        if num_rows := self._runner.num_live_rows:
            _LOG.warning("the attachment to the scheduler is lost: %d running sequences dropped", num_rows)
        if self._attachment is not None:
            for observer in self._observers:
                observer.lost()
        self._attachment = None
        self._running.clear()
        self._runner.reset()
        self._outlet.reset()

    def _receive(self, attachment: Attachment, response: scheduler_pb2.AttachResponse) -> None:
        match response.WhichOneof("message"):
            case "router_endpoint":
                self._outlet.add_router(response.router_endpoint)
            case "router_gone":
                self._outlet.drop_router(response.router_gone)
            case "plan":
                self._step(attachment, response.plan)
            case unknown:
                _LOG.warning("a message of kind %s from the scheduler is ignored", unknown)

    def _step(self, attachment: Attachment, plan: worker_pb2.StepPlan) -> None:
        if self._threads is not None:
            self._threads.before_step()
        begun_ns = time.perf_counter_ns()
        try:
            self._check(attachment, plan)
            flight = self._runner.launch(plan)
        except PlanError as error:
            self._disagree(plan, error)
            return
        self._running.append(_Running(plan, flight, begun_ns))
        while self._running and self._running[0].flight.is_done():
            self._publish_first()

    def _publish_first(self) -> None:
        """Ends the first of the running steps: its tokens leave, then its result."""
        running, attachment = self._running.popleft(), self._attachment
        assert attachment is not None, "a lost attachment takes its steps along"
        try:
            outcome = running.flight.result()
        except PlanError as error:
            self._disagree(running.plan, error)
            return
        undelivered, num_refused_sends = self._publish(outcome)
        ended_ns = time.perf_counter_ns()
        # A step that was launched early has waited for the one before.
        begun_ns = max(running.begun_ns, self._last_ended_ns)
        self._last_ended_ns = ended_ns
        result = step_result(outcome, attachment.incarnation, undelivered, ended_ns - begun_ns)
        attachment.say(scheduler_pb2.AttachRequest(result=result))
        if self._observers:
            step = Step(running.plan, outcome, begun_ns, ended_ns, undelivered, num_refused_sends)
            for observer in self._observers:
                observer.stepped(step)
        if self._threads is not None:
            self._threads.after_step((ended_ns - begun_ns) / 1e9)

    def _disagree(self, plan: worker_pb2.StepPlan, error: PlanError) -> None:
        _LOG.error("step %d: the scheduler's plan disagrees with the worker: %s; attaching anew", plan.step, error)
        if self._attachment is not None:
            self._attachment.abandon()
        self._forget()

    def _check(self, attachment: Attachment, plan: worker_pb2.StepPlan) -> None:
        """What the runner cannot know: whom the plan is for, and which routers there are."""
        if plan.incarnation != attachment.incarnation:
            raise PlanError(f"it is for incarnation {plan.incarnation:x}, the worker is {attachment.incarnation:x}")
        for admission in plan.admissions:
            if not self._outlet.knows(admission.router_id):
                raise PlanError(f"slot {admission.slot}: router {admission.router_id} was never announced")

    def _publish(self, outcome: StepOutcome) -> tuple[set[int], int]:
        """Sends every router its tokens; returns the plan's rows whose tokens nobody took, and how many messages."""
        undelivered: set[int] = set()
        num_refused = 0
        for router_id, batches in token_batches(outcome).items():
            for batch in batches:
                if not self._outlet.send(router_id, batch.message):
                    undelivered.update(batch.plan_rows)
                    num_refused += 1
        return undelivered, num_refused
