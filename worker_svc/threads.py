"""How many threads compute a step: all usable cores, fewer while others take some of them, all again later.

The kernels share out their work so that a thread which does not get a core keeps few others waiting. Beside processes
that always want one, fewer threads are faster still, for what a thread holds while it waits nobody else can do. The
answer does not depend on the number of threads, so it may change between steps.

`decide` is the policy: a function of a state and one measured stretch of steps; `StepThreads` measures and acts. What
is measured is how long the computing threads stood in the kernel's run queues, ready and not running
(`/proc/self/task/*/schedstat`, see the kernel's sched-stats.rst). A core that a hypervisor takes is not seen.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path

_LOG = logging.getLogger(__name__)

# One of n threads is given up once all together wait for this over n of the time. With two threads, beside loads of
# many kinds, both were faster than one up to 0.4 of the time with one row, and up to 0.9 with 32 (docs/benchmarks.md).
_WAIT_SHARE = 1.4

# A stretch ends at either: a few steps, so that one odd step decides nothing, or a time in which slow ones show.
STRETCH_STEPS = 4
STRETCH_S = 0.2

# A taken core is tried again after the first of these, and after twice as long each time that it is still taken. A try
# in vain costs a part of a stretch.
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 8.0
# Threads that were added and have lost nothing for so long were added rightly.
_TRUST_S = 5.0

_LOG_INTERVAL_S = 10.0

# Iterations that libgomp spins at a barrier before it sleeps; its own default of 300,000 is milliseconds, longer than
# any pause inside a step, and holds a core that the awaited thread may need.
_SPIN_COUNT = "10000"


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Bounds how long a thread spins at a barrier, unless the environment says how; before libgomp is loaded."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)


@dataclass(frozen=True)
class ThreadState:
    """Threads in use, of at most `max_threads`, and when to try one more. Times are seconds of one clock."""

    num_threads: int
    max_threads: int
    # When cores were last short, or the number of threads last changed.
    quiet_since_s: float
    retry_s: float = FIRST_RETRY_S
    raised_s: float | None = None


@dataclass(frozen=True)
class Stretch:
    """Some steps: how long they took, and how long their threads, taken together, waited for a core meanwhile."""

    wall_s: float
    waited_s: float


def decide(state: ThreadState, stretch: Stretch, now_s: float) -> ThreadState:
    """The state after a stretch of steps that ended at `now_s`."""
    if state.num_threads > 1 and stretch.waited_s * state.num_threads > _WAIT_SHARE * stretch.wall_s:
        return _short_of_cores(state, now_s)
    if state.raised_s is not None and now_s - state.raised_s >= _TRUST_S:
        state = replace(state, retry_s=FIRST_RETRY_S, raised_s=None)
    if state.num_threads < state.max_threads and now_s - state.quiet_since_s >= state.retry_s:
        return replace(state, num_threads=state.num_threads + 1, quiet_since_s=now_s, raised_s=now_s)
    return state


def _short_of_cores(state: ThreadState, now_s: float) -> ThreadState:
    was_in_vain = state.raised_s is not None
    return replace(
        state,
        num_threads=state.num_threads - 1,
        quiet_since_s=now_s,
        retry_s=min(2 * state.retry_s, LONGEST_RETRY_S) if was_in_vain else state.retry_s,
        raised_s=None,
    )


class StepThreads:
    """Owns the number of threads of the step thread's backend. Used in that thread alone."""

    def __init__(
        self,
        max_threads: int,
        set_num_threads: Callable[[int], None],
        waits: RunQueueWaits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`set_num_threads` makes the threads too, so that they are found; it is called here for the first time."""
        self._set_num_threads = set_num_threads
        self._waits = waits
        self._clock = clock
        self._state = ThreadState(max_threads, max_threads, clock())
        self._logged_s: float | None = None
        self._num_steps, self._wall_s = 0, 0.0
        with waits.watching_new_threads():
            set_num_threads(max_threads)

    @property
    def num_threads(self) -> int:
        """Threads of the next step."""
        return self._state.num_threads

    def before_step(self) -> None:
        """A step begins. What threads waited while there was nothing to do is forgotten."""
        if self._num_steps == 0:
            self._waits.take_s()

    def after_step(self, wall_s: float) -> None:
        """Takes in that a step took so long; the next one may run with another number of threads."""
        self._num_steps += 1
        self._wall_s += wall_s
        if self._num_steps < STRETCH_STEPS and self._wall_s < STRETCH_S:
            return
        # Threads wait between steps too: what is more than the steps took is none of theirs.
        stretch = Stretch(self._wall_s, min(self._waits.take_s(), self._wall_s))
        self._num_steps, self._wall_s = 0, 0.0
        before, self._state = self._state, decide(self._state, stretch, self._clock())
        if self._state.num_threads != before.num_threads:
            self._adopt(before.num_threads, stretch)

    def _adopt(self, num_before: int, stretch: Stretch) -> None:
        num_threads = self._state.num_threads
        with self._waits.watching_new_threads():
            self._set_num_threads(num_threads)
        now_s = self._clock()
        if self._logged_s is not None and now_s - self._logged_s < _LOG_INTERVAL_S:
            return
        self._logged_s = now_s
        why = (
            f"others take a core (the last steps waited for one {stretch.waited_s / stretch.wall_s:.0%} of their time)"
            if num_threads < num_before
            else "trying again a core that was taken"
        )
        _LOG.info("threads: %d of %d: %s", num_threads, self._state.max_threads, why)


class RunQueueWaits:
    """How long the computing threads have waited in run queues: the one that made this, and those it is shown.

    Other threads of the process (gRPC's, ZeroMQ's) wait too, whenever a step has all cores; that says nothing.
    """

    def __init__(self, tasks: Path = Path("/proc/self/task")) -> None:
        """Raises OSError where the system keeps no account."""
        self._tasks = tasks
        # By open file: what the thread had waited when it was last looked at, in nanoseconds.
        self._waited_ns: dict[int, int] = {}
        self._watch(str(threading.get_native_id()))

    @contextlib.contextmanager
    def watching_new_threads(self) -> Iterator[None]:
        """Threads that begin inside are watched from now on."""
        before = set(os.listdir(self._tasks))
        yield
        for task in set(os.listdir(self._tasks)) - before:
            with contextlib.suppress(OSError):  # ended already
                self._watch(task)

    def take_s(self) -> float:
        """Seconds waited since the last call, all threads together."""
        taken_ns = 0
        for file, before_ns in list(self._waited_ns.items()):
            try:
                waited_ns = _waited_ns(file)
            except OSError:  # the thread has ended
                del self._waited_ns[file]
                os.close(file)
                continue
            taken_ns += waited_ns - before_ns
            self._waited_ns[file] = waited_ns
        return taken_ns / 1e9

    def close(self) -> None:
        """Lets go of the files."""
        for file in self._waited_ns:
            os.close(file)
        self._waited_ns.clear()

    def _watch(self, task: str) -> None:
        file = os.open(self._tasks / task / "schedstat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._waited_ns[file] = _waited_ns(file)
        except OSError:
            os.close(file)
            raise


def _waited_ns(file: int) -> int:
    """The second of three numbers: time on a core, time waiting for one, turns."""
    return int(os.pread(file, 64, 0).split()[1])


def watched_threads(
    num_threads: int | None, num_usable_cpus: int, set_num_threads: Callable[[int], None]
) -> StepThreads | None:
    """The policy, said in the log; None where the number is fixed. Call it before anything computes in parallel."""
    if num_threads is not None:
        _LOG.info("threads: %d (--num-threads)", num_threads)
        return None
    if num_usable_cpus == 1:
        _LOG.info("threads: 1, for there is one core for this process")
        return None
    try:
        waits = RunQueueWaits()
    except OSError:
        _LOG.info("threads: %d, one a core; this system does not say when others take a core", num_usable_cpus)
        return None
    _LOG.info("threads: %d, one a core, and fewer while others take a core", num_usable_cpus)
    return StepThreads(num_usable_cpus, set_num_threads, waits)
