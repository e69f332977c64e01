"""Times `plan` and `complete` of one replica in steady decode: what is compared, beside each other.

A machine shared with others computes at half its speed for seconds at a time. So all that is compared is built first
and stepped in turn, some steps each, round after round, and of its rounds each counts the fastest.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping
from random import Random

from benchmarks.scheduler_fleet import replica_spec, request
from benchmarks.scheduler_promises import UNBOUNDED, Figures
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import StepPlan, StepResult
from scheduler_svc.core.scheduler import Scheduler

_NUM_ROUNDS = 15
_STEPS_A_ROUND = 32  # twice round the blocks, whose edges are spread evenly over the rows


class Decoder:
    """One replica whose rows all decode, answered two plans deep by prepared results."""

    def __init__(self, num_rows: int, num_waiting: int = 0, num_blocks: int | None = None) -> None:
        random = Random(0)
        self.core = Scheduler(CoreLimits(**UNBOUNDED))  # type: ignore[arg-type]
        blocks = num_blocks or num_rows * 70
        self.core.attach(replica_spec(num_device_blocks=blocks, num_slots=num_rows, max_step_tokens=8192), 0)
        for number in range(num_rows):
            prompt = [random.randrange(50_000) for _ in range(100 + number % 16)]
            self.core.submit(request(number + 1, prompt, 900), 0)
        self._plans: list[StepPlan] = []
        self._now = 0
        self._submit_waiting(num_rows, num_waiting)
        while len(self.core.replicas[1].rows.steady) < num_rows:
            self.step()
        for _ in range(20):
            self.step()

    def _submit_waiting(self, first: int, num_waiting: int) -> None:
        for number in range(num_waiting):
            self.core.submit(request(first + number + 1, (1, 2, 3, number % 50_000), 100), 0)

    def step(self) -> float:
        """One plan and one answer; returns the seconds they took."""
        self._now += 1_000_000
        begin = time.thread_time()
        plan = self.core.plan(1, self._now).plan
        took = time.thread_time() - begin
        if plan is not None:
            self._plans.append(plan)
        if len(self._plans) == 2 or plan is None:
            answered = self._plans.pop(0)
            num_sampled = list(self.core.replicas[1].rows.unanswered[0].num_to_sample)
            result = StepResult(answered.incarnation, answered.step, num_sampled, [5] * sum(num_sampled))
            begin = time.thread_time()
            self.core.complete(1, result, self._now)
            took += time.thread_time() - begin
        return took


def steady_decode() -> Figures:
    """Milliseconds of plan and complete against the number of rows."""
    return {**_in_turn({str(num): Decoder(num) for num in (32, 256, 1024)})}


def against_waiting() -> Figures:
    """The same at 256 rows, against what waits."""
    return _against({num: Decoder(256, num_waiting=num) for num in (10, 1_000, 100_000)})


def against_pool() -> Figures:
    """The same at 256 rows, against the size of the pool."""
    return _against({num: Decoder(256, num_blocks=num) for num in (20_000, 200_000, 2_000_000)})


def _against(decoders: Mapping[int, Decoder]) -> Figures:
    found = _in_turn({str(num): decoder for num, decoder in decoders.items()})
    least, most = str(min(decoders)), str(max(decoders))
    return {**found, f"ratio {most} : {least}": round(found[most] / found[least], 3)}


def _in_turn(decoders: Mapping[str, Decoder]) -> dict[str, float]:
    """Milliseconds a step: the mean of each one's fastest round."""
    gc.collect()
    rounds: dict[str, list[float]] = {name: [] for name in decoders}
    for _ in range(_NUM_ROUNDS):
        for name, decoder in decoders.items():
            rounds[name].append(statistics.mean(decoder.step() for _ in range(_STEPS_A_ROUND)))
    return {name: round(min(found) * 1e3, 4) for name, found in rounds.items()}
