"""Who leaves when blocks or slots run short, and that nobody can tell afterwards."""

from __future__ import annotations

import pytest

from scheduler_svc.core.types import CoreLimits, Finished, FinishReason, Preempted, Scheduled
from tests.core.house import House, Stream, spec


def preempted(stream: Stream) -> list[Preempted]:
    return [event for event in stream.events if isinstance(event, Preempted)]


def test_the_newest_leaves_when_blocks_run_short() -> None:
    house = House()
    house.attach(spec(num_device_blocks=4))
    old = house.submit([1, 2, 3, 4, 5, 6, 7], max_tokens=9)
    new = house.submit([8, 9, 10, 11, 12, 13, 14], max_tokens=9)
    house.step()  # both prompts: two blocks each, all four in use
    house.step()  # position 7, the last place in them
    house.step()
    assert (len(preempted(old)), len(preempted(new))) == (0, 1)
    assert preempted(new)[0].num_blocks == 2
    assert "no free KV block for sequence 1" in preempted(new)[0].reason
    house.drain()
    house.check_outcomes(num_cache_tokens=16)


def test_the_worst_priority_leaves_before_the_newest() -> None:
    house = House()
    house.attach(spec(num_device_blocks=4))
    worse = house.submit([1, 2, 3, 4, 5, 6, 7], max_tokens=9, priority=1)
    better = house.submit([8, 9, 10, 11, 12, 13, 14], max_tokens=9, priority=0)
    for _ in range(3):
        house.step()
    assert (len(preempted(worse)), len(preempted(better))) == (1, 0)
    house.drain()
    house.check_outcomes(num_cache_tokens=16)


def test_a_token_in_flight_survives_preemption() -> None:
    house = House()
    house.attach(spec(num_device_blocks=4))
    house.submit([1, 2, 3, 4, 5, 6, 7], max_tokens=9)
    new = house.submit([8, 9, 10, 11, 12, 13, 14], max_tokens=9)
    house.step()
    house.make_plan()  # position 7 of both, unanswered
    house.make_plan()  # position 8 of the old one: the new one must go while its token is in flight
    assert len(preempted(new)) == 1
    assert house.scheduler.statistics().num_waiting == {"model": 0}  # it settles first
    house.run()
    assert len(new.received) == 2
    house.complete()
    assert house.scheduler.statistics().num_waiting == {"model": 1}
    assert house.scheduler.statistics().num_waiting_tokens == 9  # the token in flight was kept
    house.drain()
    house.check_outcomes(num_cache_tokens=16)
    again = new.events[-2]
    assert isinstance(again, Scheduled)
    assert again.recomputed_tokens + again.cached_tokens == 8


def test_a_preempted_sequence_leaves_only_what_was_answered() -> None:
    house = House()
    house.attach(spec(num_slots=1))
    house.submit(range(20), max_tokens=5, priority=1)
    house.step()  # four blocks
    house.make_plan()  # the fifth, unanswered
    house.submit([40], max_tokens=1)
    house.make_plan()
    assert house.scheduler.statistics().replicas[0].num_cached_blocks == 4
    house.drain()
    house.check_outcomes()


@pytest.mark.parametrize("leaves", ["preempted", "cancelled"])
def test_whoever_leaves_leaves_the_block_that_it_filled_last(leaves: str) -> None:
    house = House()
    house.attach(spec(num_slots=1))
    stream = house.submit([1, 2, 3], max_tokens=9, priority=1)
    house.step()
    house.step()  # position 3, the last of the block
    if leaves == "cancelled":
        house.cancel(stream)
    else:
        house.submit([40], max_tokens=1)
        house.make_plan()
    assert (stream.is_running, house.scheduler.statistics().replicas[0].num_cached_blocks) == (False, 1)
    house.drain()


def test_what_is_lost_twice_is_recomputed_from_the_first_loss_on() -> None:
    house = House(CoreLimits(enable_prefix_caching=False, expected_output_tokens=0))
    house.attach(spec(num_slots=1, max_step_tokens=8))
    stream = house.submit(range(20), max_tokens=9, priority=1)
    for _ in range(4):
        house.step()  # the prompt, and position 20
    for _ in range(2):
        house.submit([40], max_tokens=1)
        house.step()
        house.step()  # it starts again, with its first eight tokens
    starts = [event for event in stream.events if isinstance(event, Scheduled)]
    assert [event.recomputed_tokens for event in starts] == [0, 21, 21]
    assert [event.queue_ns for event in starts] == [1000, 1000, 1000]  # from the submission, then from each loss
    house.drain()
    house.check_outcomes()


def test_strictly_better_work_displaces_for_a_slot() -> None:
    house = House()
    house.attach(spec(num_slots=2))
    first, second = (house.submit([n, n], max_tokens=9, priority=1) for n in (1, 2))
    house.step()
    equal = house.submit([3, 3], max_tokens=3, priority=1)
    house.step()
    assert not equal.is_running  # equal never displaces
    better = house.submit([4, 4], max_tokens=3, priority=0)
    house.step()
    assert (first.is_running, second.is_running, better.is_running) == (True, False, True)
    assert "better priority" in preempted(second)[0].reason
    house.drain()
    house.check_outcomes()


def test_equal_work_is_not_displaced_for_an_earlier_deadline() -> None:
    house = House()
    house.attach(spec(num_device_blocks=8, max_step_tokens=40))
    equal = house.submit(range(12), max_tokens=3)
    house.submit([40], max_tokens=9, priority=1)
    house.step()
    urgent = house.submit(range(12, 36), max_tokens=1, deadline_ns=10**9)  # six blocks: the worse one alone makes five
    house.step()
    assert (equal.is_running, urgent.is_running) == (True, False)
    house.drain()
    house.check_outcomes(num_cache_tokens=32)


def test_better_work_displaces_for_blocks_only_if_that_suffices() -> None:
    house = House()
    house.attach(spec(num_device_blocks=8))
    worse = house.submit(range(8), max_tokens=4, priority=1)
    equal = house.submit(range(10, 22), max_tokens=4, priority=0)
    house.step()
    large = house.submit(range(30, 54), max_tokens=2, priority=0)  # needs 6 blocks; displacing `worse` frees 5 in all
    house.step()
    assert (worse.is_running, equal.is_running, large.is_running) == (True, True, False)
    small = house.submit(range(60, 76), max_tokens=2, priority=-1)  # needs 4
    house.step()
    assert (worse.is_running, equal.is_running, small.is_running) == (False, True, True)
    house.drain()
    house.check_outcomes(num_cache_tokens=32)


def test_blocks_that_the_newcomer_shares_are_not_counted_as_freed() -> None:
    house = House()
    house.attach(spec(num_device_blocks=8, max_step_tokens=32))
    worse = house.submit(range(20), max_tokens=2, priority=1)  # 5 blocks
    house.submit(range(50, 57), max_tokens=3)  # 2 blocks
    house.step()
    newcomer = house.submit([*range(16), *range(30, 42)], max_tokens=1)  # shares 4, needs 3 more; one is free
    house.make_plan()
    assert (worse.is_running, newcomer.is_running) == (True, False)
    house.drain()
    house.check_outcomes(num_cache_tokens=32)


@pytest.mark.parametrize(
    ("num_tokens", "budget", "share"), [(1, 2, 2), (30, 8, 8), (1, 1, 1)], ids=["steady", "filling", "spent"]
)
def test_tokens_of_a_displaced_row_go_to_the_one_that_displaced_it(num_tokens: int, budget: int, share: int) -> None:
    house = House()
    house.attach(spec(num_slots=1, max_step_tokens=budget))
    house.submit(range(num_tokens), max_tokens=9, priority=1)
    house.step()
    house.submit(range(40, 60), max_tokens=1, priority=0)
    plan = house.make_plan()
    assert (list(plan.row_starts), list(plan.row_counts)) == ([0], [share])
    house.drain()
    house.check_outcomes()


def test_one_without_tokens_in_the_step_is_not_displaced_for_its_slot_alone() -> None:
    house = House()
    house.attach(spec(num_slots=2, max_step_tokens=2))
    house.submit([1], max_tokens=1, priority=2)
    filling = house.submit([2, 3, 4], max_tokens=9)
    house.make_plan()
    better = house.submit([5], max_tokens=1, priority=1)
    assert list(house.make_plan().row_counts) == [2]
    assert (better.is_running, filling.is_running) == (False, True)
    house.drain()
    house.check_outcomes()


def test_one_without_tokens_in_the_step_makes_a_slot_but_no_tokens() -> None:
    house = House()
    house.attach(spec(num_slots=2, max_step_tokens=2))
    house.submit([1], max_tokens=1, priority=2)
    filling = house.submit([2, 3, 4], max_tokens=9, priority=1)
    house.make_plan()  # a token of each; the first waits for its last answer now
    better = house.submit([5], max_tokens=1)
    plan = house.make_plan()  # the two tokens would be the filling one's
    assert (better.is_running, filling.is_running) == (True, False)
    assert list(plan.row_counts) == [1]
    house.drain()
    house.check_outcomes()


def test_an_outgrown_sequence_that_is_displaced_while_it_settles_still_ends() -> None:
    house = House()
    house.attach(spec(num_device_blocks=2))
    stream = house.submit([1, 2, 3, 4, 5, 6], max_tokens=50, priority=1)
    house.step()
    house.step()
    house.make_plan()  # position 7, the last place
    assert house.plan().plan is None  # position 8 has none
    better = house.submit([9], max_tokens=1)
    house.make_plan()
    assert better.is_running
    house.drain()
    house.check_outcomes(num_cache_tokens=8)
    assert isinstance(stream.outcome, Finished)
    assert len(preempted(stream)) == 1


def test_a_preempted_sequence_precedes_newer_equals() -> None:
    house = House()
    house.attach(spec(num_slots=1))
    first = house.submit([1], max_tokens=3, priority=1)
    house.step()
    house.submit([2], max_tokens=1, priority=0)
    newer = house.submit([3], max_tokens=3, priority=1)
    house.step()
    house.step()
    assert (first.is_running, newer.is_running) == (True, False)


def test_a_sequence_that_outgrows_the_pool_alone_ends_with_length() -> None:
    house = House()
    house.attach(spec(num_device_blocks=2))
    stream = house.submit([1, 2, 3], max_tokens=50)
    house.drain()
    assert stream.outcome == Finished(1, 6, FinishReason.LENGTH)  # 8 places, and one token that needs none
    assert len(stream.received) == 6


@pytest.mark.parametrize("depth_first", [False, True])
def test_f36_many_streams_in_a_small_pool_get_the_text_they_get_alone(depth_first: bool) -> None:
    house = House()
    house.attach(spec(num_device_blocks=14, num_slots=8))
    streams = [house.submit([n, n + 1, n + 2], max_tokens=45, age_ns=n * depth_first) for n in range(8)]
    house.drain()
    house.check_outcomes(num_cache_tokens=56)
    assert sum(len(preempted(stream)) for stream in streams) > 8
    for stream in streams:
        again = [event for event in stream.events if isinstance(event, Scheduled)][1:]
        assert all(event.recomputed_tokens + event.cached_tokens > 0 for event in again)
