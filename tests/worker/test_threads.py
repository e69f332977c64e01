"""The policy of step threads, decided on numbers; and what is measured, on real threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from worker_svc.threads import (
    FIRST_RETRY_S,
    LONGEST_RETRY_S,
    STRETCH_S,
    STRETCH_STEPS,
    RunQueueWaits,
    StepThreads,
    Stretch,
    ThreadState,
    decide,
    limit_spinning,
    watched_threads,
)

QUIET, TAKEN = Stretch(1.0, 0.02), Stretch(1.0, 0.8)


def test_keeps_all_threads_while_cores_are_free() -> None:
    state = ThreadState(2, 2, quiet_since_s=0.0)
    assert decide(state, QUIET, 5.0) == state


def test_one_fewer_once_waiting_costs_more_than_the_thread_gives() -> None:
    assert decide(ThreadState(2, 2, 0.0), TAKEN, 5.0).num_threads == 1
    # Sixteen threads lose little by becoming fifteen, two lose half.
    tenth = Stretch(1.0, 0.1)
    assert decide(ThreadState(16, 16, 0.0), tenth, 5.0).num_threads == 15
    assert decide(ThreadState(2, 2, 0.0), tenth, 5.0).num_threads == 2


def test_the_last_thread_stays_and_is_joined_again_whatever_it_waits() -> None:
    waiting = Stretch(1.0, 1.0)
    state = decide(ThreadState(1, 2, quiet_since_s=5.0), waiting, 5.0 + 0.9 * FIRST_RETRY_S)
    assert state.num_threads == 1
    assert decide(state, waiting, 5.0 + FIRST_RETRY_S).num_threads == 2


def test_a_core_that_stays_taken_is_tried_ever_more_rarely() -> None:
    state, now_s, raises = ThreadState(2, 2, 0.0), 0.0, []
    while now_s < 600:
        now_s += 0.125
        before, state = state, decide(state, TAKEN if state.num_threads == 2 else QUIET, now_s)
        if state.num_threads > before.num_threads:
            raises.append(now_s)
    waits = [later - earlier for earlier, later in pairwise(raises)]
    assert waits == sorted(waits)
    assert max(waits) == pytest.approx(LONGEST_RETRY_S, abs=0.5)
    assert len(raises) < 80


def test_a_return_that_lasts_is_forgiven() -> None:
    state = ThreadState(1, 2, 0.0, retry_s=LONGEST_RETRY_S)
    state = decide(state, QUIET, 32.0)
    assert (state.num_threads, state.retry_s) == (2, LONGEST_RETRY_S)
    state = decide(state, QUIET, 40.0)
    assert state.retry_s == FIRST_RETRY_S
    assert decide(state, TAKEN, 41.0).retry_s == FIRST_RETRY_S


def test_many_threads_come_down_and_return_one_by_one() -> None:
    state = ThreadState(4, 4, 0.0)
    for now_s in (1.0, 1.25, 1.5):
        state = decide(state, Stretch(1.0, 1.0), now_s)
    assert state.num_threads == 1
    now_s = 1.5
    for expected in (2, 3, 4):
        now_s += FIRST_RETRY_S
        state = decide(state, QUIET, now_s)
        assert state.num_threads == expected


class FakeWaits(RunQueueWaits):
    """Says what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def take_s(self) -> float:
        taken, self.now_s = self.now_s, 0.0
        return taken


@pytest.fixture
def waits() -> Iterator[FakeWaits]:
    made = FakeWaits()
    yield made
    made.close()


def test_steps_are_judged_a_few_at_a_time(waits: FakeWaits) -> None:
    said: list[int] = []
    threads = StepThreads(2, said.append, waits, clock=lambda: 7.0)
    assert said == [2]
    for _ in range(STRETCH_STEPS):
        assert threads.num_threads == 2
        threads.before_step()
        waits.now_s += 0.009
        threads.after_step(0.01)
    assert (said, threads.num_threads) == ([2, 1], 1)


def test_one_very_slow_step_is_enough(waits: FakeWaits) -> None:
    threads = StepThreads(2, lambda _: None, waits, clock=lambda: 7.0)
    threads.before_step()
    waits.now_s += STRETCH_S
    threads.after_step(STRETCH_S)
    assert threads.num_threads == 1


def test_waiting_while_idle_says_nothing(waits: FakeWaits) -> None:
    threads = StepThreads(2, lambda _: None, waits, clock=lambda: 7.0)
    waits.now_s = 100.0
    for _ in range(STRETCH_STEPS):
        threads.before_step()
        threads.after_step(0.01)
    assert threads.num_threads == 2


def write_schedstat(tasks: Path, task: int, waited_ns: int) -> None:
    (tasks / str(task)).mkdir(exist_ok=True)
    (tasks / str(task) / "schedstat").write_text(f"123456 {waited_ns} 77\n")


def test_adds_up_its_own_thread_and_those_it_is_shown(tmp_path: Path) -> None:
    own = threading.get_native_id()
    write_schedstat(tmp_path, own, 1_000)
    write_schedstat(tmp_path, own + 1, 10_000)
    waits = RunQueueWaits(tmp_path)
    with waits.watching_new_threads():
        write_schedstat(tmp_path, own + 2, 5_000)
    write_schedstat(tmp_path, own, 1_000 + 300)
    write_schedstat(tmp_path, own + 1, 99_000)
    write_schedstat(tmp_path, own + 2, 5_000 + 40)
    assert waits.take_s() == pytest.approx(340e-9)
    assert waits.take_s() == 0.0
    waits.close()


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system keeps no account of waiting")
def test_real_threads_are_watched_until_they_end() -> None:
    waits, end = RunQueueWaits(), threading.Event()
    thread = threading.Thread(target=end.wait)
    num_files = len(os.listdir("/proc/self/fd"))
    with waits.watching_new_threads():
        thread.start()
    assert len(os.listdir("/proc/self/fd")) == num_files + 1
    assert waits.take_s() >= 0
    task = Path(f"/proc/self/task/{thread.native_id}")
    end.set()
    thread.join()
    while task.exists():  # the system forgets a thread shortly after it has ended
        os.sched_yield()
    assert waits.take_s() >= 0
    assert len(os.listdir("/proc/self/fd")) == num_files
    waits.close()


def test_no_policy_for_a_fixed_number_or_a_single_core(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert watched_threads(3, 8, lambda _: None) is None
    assert watched_threads(None, 1, lambda _: None) is None
    assert [record.message for record in caplog.records] == [
        "threads: 3 (--num-threads)",
        "threads: 1, for there is one core for this process",
    ]


def test_spinning_is_limited_unless_the_environment_decides() -> None:
    plain: dict[str, str] = {}
    limit_spinning(plain)
    assert plain.keys() == {"GOMP_SPINCOUNT"}
    for own in ({"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}):
        kept = dict(own)
        limit_spinning(kept)
        assert kept == own
