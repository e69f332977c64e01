"""What readiness remembers of workers' starts."""

from __future__ import annotations

from octavo.internal.v1 import scheduler_pb2, types_pb2
from octavo.phases import Phase
from router.worker_starts import MAX_WORKERS, WorkerStarts


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def at(name: str, phase: str, detail: str = "") -> scheduler_pb2.StartingWorker:
    return scheduler_pb2.StartingWorker(name=name, phase=types_pb2.StartPhase(name=phase, detail=detail))


def observed(*reports: tuple[float, list[scheduler_pb2.StartingWorker]]) -> tuple[WorkerStarts, Clock]:
    clock = Clock()
    starts = WorkerStarts(clock)
    for clock.now, starting in reports:
        starts.observe(starting)
    return starts, clock


def test_each_phase_keeps_its_time_and_the_running_one_counts_on() -> None:
    starts, clock = observed(
        (1.0, [at("a", "import")]),
        (3.0, [at("a", "weights", "0/30 tensors")]),
        (4.0, [at("a", "weights", "12/30 tensors")]),
    )
    clock.now = 5.5
    assert starts.snapshot() == [
        ("a", Phase("import", 2.0, ended=True)),
        ("a", Phase("weights", 2.5, ended=False, done=12, total=30)),
    ]


def test_a_start_that_succeeded_stays_readable() -> None:
    starts, _ = observed((1.0, [at("a", "warm-up")]), (1.25, []), (9.0, []))
    assert starts.snapshot() == [("a", Phase("warm-up", 0.25, ended=True))]


def test_a_start_that_failed_is_forgotten() -> None:
    starts, _ = observed((1.0, [at("a", "weights"), at("b", "kv")]), (2.0, [at("b", "kv")]))
    assert [name for name, _ in starts.snapshot()] == ["b"]


def test_only_so_many_are_remembered() -> None:
    reports = [(float(i), [at(f"w{i}", "warm-up")]) for i in range(3 * MAX_WORKERS)]
    starts, _ = observed(*reports)
    names = [name for name, _ in starts.snapshot()]
    assert len(names) == MAX_WORKERS
    assert names[-1] == f"w{3 * MAX_WORKERS - 1}"
    crowd, _ = observed((0.0, [at(f"w{i}", "import") for i in range(2 * MAX_WORKERS)]), (1.0, []))
    assert crowd.snapshot() == []
