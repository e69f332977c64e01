"""Who goes first under each policy, what deadlines do, and how long anybody can be held back."""

from __future__ import annotations

import pytest

from scheduler_svc.core.limits import SchedulingPolicy
from scheduler_svc.core.types import CoreLimits, Ended, EndReason, RefusalReason, Refused, Scheduled
from tests.core.house import House, Stream, spec


def one_by_one(policy: SchedulingPolicy = SchedulingPolicy.PRIORITY, **limits: object) -> House:
    """A replica that runs one sequence at a time."""
    house = House(CoreLimits(policy=policy, max_num_seqs=1, **limits))  # type: ignore[arg-type]
    house.attach(spec())
    return house


def started(streams: dict[str, Stream]) -> list[str]:
    def at(name: str) -> int:
        return next(event.queue_ns for event in streams[name].events if isinstance(event, Scheduled))

    return sorted(streams, key=at)


def test_fcfs_looks_at_neither_priority_nor_deadline() -> None:
    house = one_by_one(SchedulingPolicy.FCFS)
    running = house.submit([9], max_tokens=9, priority=5)
    house.step()
    streams = {
        "first": house.submit([1], max_tokens=1, priority=3),
        "urgent": house.submit([2], max_tokens=1, priority=-3, deadline_ns=10**9),
    }
    house.step()
    assert running.is_running
    house.drain()
    house.check_outcomes()
    assert started(streams) == ["first", "urgent"]


def test_under_fcfs_not_even_who_came_before_it_displaces_one_that_runs() -> None:
    house = one_by_one(SchedulingPolicy.FCFS)
    running = house.submit([9], max_tokens=9, priority=5)
    house.step()
    older = house.submit([1], max_tokens=1, priority=-3, age_ns=10**6)
    house.step()
    assert (running.is_running, older.is_running) == (True, False)


def test_among_equals_the_earliest_deadline_goes_first_and_priority_before_it() -> None:
    house = one_by_one()
    streams = {
        "none": house.submit([1], max_tokens=1),
        "late": house.submit([2], max_tokens=1, deadline_ns=9 * 10**9),
        "early": house.submit([3], max_tokens=1, deadline_ns=2 * 10**9),
        "worse": house.submit([4], max_tokens=1, priority=1, deadline_ns=10**9),
        "better": house.submit([5], max_tokens=1, priority=-1),
    }
    house.drain()
    house.check_outcomes()
    assert started(streams) == ["better", "early", "late", "none", "worse"]


def test_of_equal_deadlines_who_came_first_goes_first() -> None:
    house = one_by_one()
    streams = {
        "later": house.submit([1], max_tokens=1, deadline_ns=10**9),
        "first": house.submit([2], max_tokens=1, deadline_ns=10**9, age_ns=5000),
    }
    house.drain()
    assert started(streams) == ["first", "later"]


@pytest.mark.parametrize("better", [0, 1, 2])
def test_newcomers_hold_a_sequence_back_no_longer_than_the_bound(better: int) -> None:
    """One of priority 3 waits while better ones keep coming: it starts before all that come after the bound."""
    aging_ns = 100_000
    house = one_by_one(aging_ns=aging_ns)
    house.submit([9], max_tokens=4)
    house.step()
    waiting = house.submit([1, 2], max_tokens=1, priority=3)
    accepted, streams = house.now, []
    while not any(isinstance(event, Scheduled) for event in waiting.events):
        streams.append((house.now, house.submit([3], max_tokens=2, priority=better)))
        house.step()
        assert house.now < accepted + 20 * aging_ns, "it starves"
    bound = accepted + (3 - better + 1) * aging_ns
    started_before = [at for at, stream in streams if any(isinstance(e, Scheduled) for e in stream.events)]
    assert max(started_before) < bound
    assert house.now > accepted + aging_ns * (3 - better)  # until then the better ones did go first


def test_one_that_grew_old_is_not_displaced_at_once() -> None:
    house = one_by_one(aging_ns=10_000)
    old = house.submit([1, 2], max_tokens=30, priority=1)
    house.now += 50_000
    house.step()
    better = house.submit([3], max_tokens=1, priority=0)
    house.step()
    assert (old.is_running, better.is_running) == (True, False)


def test_a_passed_deadline_ends_a_sequence_before_it_costs_another_step() -> None:
    house = House()
    house.attach(spec())
    running = house.submit([1, 2, 3], max_tokens=50, deadline_ns=3500)
    other = house.submit([4, 5, 6], max_tokens=5)
    house.step()
    house.step()
    house.step()
    plan = house.make_plan()  # at 4000
    assert running.outcome == Ended(1, EndReason.DEADLINE)
    assert len(plan.row_slots) == 1
    assert house.scheduler.statistics().num_expired == 1
    house.drain()
    house.check_outcomes()
    assert other.finish is not None


def test_a_deadline_ends_what_waits_and_what_settles_and_needs_no_replica() -> None:
    house = House()
    house.attach(spec(num_slots=1))
    settling = house.submit([1, 2, 3], max_tokens=50, priority=1, deadline_ns=50_000)
    house.make_plan()
    house.submit([4], max_tokens=50)
    house.make_plan()  # displaces it while its row is unanswered
    waiting = house.submit([5], max_tokens=1, deadline_ns=50_000)
    house.now = 60_000
    assert house.tick() == ()
    assert settling.outcome == Ended(1, EndReason.DEADLINE)
    assert waiting.outcome == Ended(3, EndReason.DEADLINE)
    house.run()
    house.complete()
    house.drain()


def test_one_that_would_miss_its_deadline_is_refused_by_the_backlog() -> None:
    house = one_by_one()
    for n in range(12):
        house.submit([n, n], max_tokens=2)
    house.drain()
    for n in range(10):
        house.submit([n], max_tokens=50)
    house.step()
    interval = house.scheduler.statistics().start_interval_ns["model"]
    with pytest.raises(Refused) as caught:
        house.submit([1, 2], deadline_ns=5 * interval, priority=1)
    assert caught.value.reason is RefusalReason.DEADLINE
    assert "left to the deadline" in str(caught.value)
    house.submit([1, 2], deadline_ns=1000 * interval, priority=1)
    house.submit([1, 2], deadline_ns=5 * interval, priority=-1)  # goes before the others


def paced() -> House:
    """As `one_by_one`, after starts that tell the pace; one that may go on for long runs."""
    house = one_by_one()
    for n in range(12):
        house.submit([n, n], max_tokens=2)
    house.drain()
    house.submit([40], max_tokens=50)
    house.step()
    return house


def test_a_resumed_one_is_not_refused_for_the_backlog() -> None:
    house = paced()
    for n in range(10):
        house.submit([n], max_tokens=50)
    left_ns = 5 * house.scheduler.statistics().start_interval_ns["model"]
    with pytest.raises(Refused, match="deadline"):
        house.submit([1, 2], deadline_ns=left_ns, priority=1)
    house.submit([1, 2], deadline_ns=left_ns, priority=1, attempt=2)


def test_the_next_to_start_waits_for_one_start_and_nobody_waits_where_a_slot_is_free() -> None:
    house = paced()
    interval = house.scheduler.statistics().start_interval_ns["model"]
    with pytest.raises(Refused, match="deadline"):
        house.submit([1, 2], deadline_ns=interval // 2)
    house.attach(spec(2))
    house.drain_replica(2)
    with pytest.raises(Refused, match="deadline"):  # a slot that takes nobody is not free
        house.submit([1, 2], deadline_ns=interval // 2)
    house.scheduler.undrain(2, house.now)
    house.submit([1, 2], deadline_ns=interval // 2)


def test_the_time_to_compute_a_prompt_counts_where_it_is_least() -> None:
    house = House(CoreLimits(max_prefill_tokens=1000))
    for replica_id, token_ns in ((1, 1_000_000), (2, 100_000)):
        house.attach(spec(replica_id, num_device_blocks=100, max_step_tokens=64)).token_ns = token_ns
        for n in range(3):
            house.submit([replica_id, n, *range(20)], max_tokens=4)
            for _ in range(5):
                house.step(replica_id)
        if replica_id == 1:
            with pytest.raises(Refused, match="time to the first token"):
                house.submit([7] * 60, deadline_ns=55_000_000)
            house.submit(
                [1, 0, *range(20), 9, 9], max_tokens=1, deadline_ns=10_000_000
            )  # cached but for a block or two
            house.drain()
            house.drain_replica(1)
    house.scheduler.undrain(1, house.now)
    house.submit([7] * 60, max_tokens=1, deadline_ns=55_000_000)  # the second is quicker
    with pytest.raises(Refused, match="time to the first token"):
        house.submit([8] * 60, deadline_ns=5_500_000)
    house.attach(spec(3))  # nobody knows yet how quick this one is
    house.submit([8] * 60, max_tokens=1, deadline_ns=5_500_000)


def test_a_group_is_not_torn_apart_by_its_deadline() -> None:
    house = paced()
    interval = house.scheduler.statistics().start_interval_ns["model"]
    for n in range(6):  # the later ones alone would be refused
        house.submit([n, 3], max_tokens=2, deadline_ns=2 * interval, group_id="g", group_size=6)
    with pytest.raises(Refused, match="deadline"):
        house.submit([9, 3], max_tokens=2, deadline_ns=2 * interval)


def test_an_expired_request_is_refused_also_when_resumed() -> None:
    house = House()
    house.attach(spec())
    with pytest.raises(Refused, match="deadline"):
        house.submit([1], deadline_ns=0, attempt=2)


def test_an_update_moves_what_waits_and_what_runs() -> None:
    house = one_by_one()
    running = house.submit([1], max_tokens=30)
    house.step()
    first, second = house.submit([2], max_tokens=1), house.submit([3], max_tokens=1)
    house.update(second, priority=-1)
    house.step()
    assert second.outcome is not None
    assert first.outcome is None
    assert running.is_live
    house.update(running, deadline_ns=1)
    house.step()
    assert running.outcome == Ended(1, EndReason.DEADLINE)
    house.drain()
    house.check_outcomes()


def test_a_deadline_that_was_moved_ends_nobody_at_its_old_time() -> None:
    house = House()
    house.attach(spec())
    stream = house.submit([1, 2, 3], max_tokens=30, deadline_ns=10_000)
    house.update(stream, deadline_ns=50_000)
    house.now = 49_999
    house.tick()
    assert stream.is_live
    house.now = 50_000  # the time itself is too late
    house.tick()
    assert stream.outcome == Ended(1, EndReason.DEADLINE)


def test_a_deadline_that_moves_again_and_again_takes_no_room() -> None:
    house = House()
    house.attach(spec())
    stream = house.submit([1, 2, 3], max_tokens=30)
    for n in range(1000):
        house.update(stream, deadline_ns=10**9 + n)
    assert len(house.scheduler.ledger.deadlines) < 200


def test_a_deadline_is_worth_no_more_than_the_aging_time() -> None:
    house = one_by_one(aging_ns=100_000)
    streams = {
        "far": house.submit([1], max_tokens=1, deadline_ns=10**9),
        "none": house.submit([2], max_tokens=1),
        "near": house.submit([3], max_tokens=1, deadline_ns=99_000),
    }
    house.drain()
    assert started(streams) == ["near", "far", "none"]


def test_an_update_of_one_that_ended_is_an_error() -> None:
    from scheduler_svc.core.types import IllegalTransition

    house = House()
    with pytest.raises(IllegalTransition, match="not live"):
        house.scheduler.update(1, 0, priority=1)
