"""Sequences with a common beginning compute it once, also when they come together."""

from __future__ import annotations

from scheduler_svc.core.limits import SchedulingPolicy
from scheduler_svc.core.plan import Limit
from scheduler_svc.core.types import CoreLimits, Scheduled
from tests.core.house import House, Stream, spec


def cached(stream: Stream) -> int:
    return next(event.cached_tokens for event in stream.events if isinstance(event, Scheduled))


def num_computed(house: House) -> int:
    return sum(replica.num_computed_tokens for replica in house.scheduler.statistics().replicas)


def roomy(**limits: object) -> House:
    house = House(CoreLimits(**limits))  # type: ignore[arg-type]
    house.attach(spec(num_device_blocks=100, num_slots=12, max_step_tokens=40))
    return house


def test_n_choices_compute_their_prompt_once() -> None:
    house = roomy()
    streams = [house.submit(range(37), max_tokens=1, group_id="g", group_size=8) for _ in range(8)]
    house.drain()
    house.check_outcomes()
    assert sorted(cached(stream) for stream in streams) == [0] + [36] * 7
    assert num_computed(house) == 37 + 7 * 1


def test_followers_wait_for_what_they_share_and_no_longer() -> None:
    house = roomy()
    leader = house.submit([*range(30), *range(60, 90)], max_tokens=3)  # two steps of 40 tokens
    follower = house.submit([*range(30), *[7] * 30], max_tokens=3)
    assert len(house.make_plan().row_slots) == 1
    assert house.scheduler.statistics().num_following == 1
    house.run()
    house.complete()  # 40 of the leader's 60 tokens are there, and all that they share
    house.make_plan()
    assert (follower.is_running, cached(follower)) == (True, 28)
    assert leader.is_running
    house.drain()
    house.check_outcomes()


def test_a_follower_may_be_longer_than_its_leader() -> None:
    house = roomy()
    leader, follower = house.submit(range(37), max_tokens=2), house.submit(range(60), max_tokens=2)
    house.make_plan()
    assert (leader.is_running, follower.is_running) == (True, False)
    house.drain()
    house.check_outcomes()
    assert cached(follower) == 36


def test_the_queue_goes_on_behind_followers() -> None:
    house = roomy()
    for _ in range(20):  # more than are looked at when they do not fit
        house.submit(range(37), max_tokens=2)
    other = house.submit(range(50, 53), max_tokens=2)
    planned = house.step()
    assert other.is_running
    assert planned.limited_by in (Limit.NOTHING_WAITING, Limit.LEADER)
    house.drain()
    house.check_outcomes()


def test_a_leader_that_dies_hands_over() -> None:
    house = roomy()
    streams = [house.submit([*range(36), n], max_tokens=2) for n in range(4)]
    house.make_plan()
    assert [stream.is_running for stream in streams] == [True, False, False, False]
    house.cancel(streams[0])  # its plan is unanswered: nothing is to be had from it
    house.make_plan()
    assert [stream.is_running for stream in streams[1:]] == [True, False, False]
    house.drain()
    house.check_outcomes()
    assert [cached(stream) for stream in streams[1:]] == [0, 36, 36]


def test_a_leader_that_is_displaced_hands_over() -> None:
    house = House()
    house.attach(spec(num_slots=2, num_device_blocks=60))
    leader, follower = (house.submit([*range(36), n], max_tokens=2, priority=1) for n in range(2))
    house.step()
    assert house.scheduler.statistics().num_following == 1
    for n in (40, 41):
        house.submit([n], max_tokens=3)
    house.step()
    assert not leader.is_running
    assert house.scheduler.statistics().num_following == 0
    house.drain()
    house.check_outcomes()
    assert follower.finish is not None


def test_a_numeric_error_of_the_leader_infects_nobody() -> None:
    house = roomy()
    leader, follower = (house.submit(range(37), max_tokens=2) for _ in range(2))
    house.replicas[1].numeric_errors.add(leader.request.stream_key)
    house.drain()
    house.check_outcomes()
    assert cached(follower) == 0


def test_nobody_waits_for_a_leader_that_is_worse() -> None:
    house = roomy()
    house.submit(range(37), max_tokens=2, priority=1)
    better = house.submit(range(37), max_tokens=2, priority=0)
    worse = house.submit(range(37), max_tokens=2, priority=2)
    house.cancel(better)
    house.make_plan()
    better = house.submit(range(37), max_tokens=2, priority=0)
    house.make_plan()
    assert (better.is_running, worse.is_running) == (True, False)
    house.drain()
    house.check_outcomes()


def test_a_leader_that_becomes_worse_is_not_waited_for() -> None:
    house = roomy()
    leader, follower = (house.submit([*range(36), n], max_tokens=2) for n in range(2))
    house.make_plan()
    house.update(leader, priority=5)
    house.make_plan()
    assert follower.is_running


def test_a_follower_may_be_cancelled_updated_and_expire() -> None:
    house = roomy()
    house.submit(range(37), max_tokens=2)
    gone, moved, late = (house.submit([*range(36), n], max_tokens=2, deadline_ns=10**6 + n) for n in range(3))
    house.make_plan()
    assert house.scheduler.statistics().num_following == 3
    house.cancel(gone)
    house.update(moved, priority=-1)
    house.now += 10**6
    house.tick()
    assert not late.is_live
    house.drain()
    house.check_outcomes()


def test_tenants_salts_and_wanted_prompt_logprobs_do_not_follow() -> None:
    house = roomy()
    house.submit(range(37), max_tokens=2)
    others = [
        house.submit(range(37), max_tokens=2, tenant="t"),
        house.submit(range(37), max_tokens=2, cache_salt="s"),
        house.submit(range(37), max_tokens=2, prompt_logprobs_start=0),
    ]
    for _ in range(4):
        house.plan()
    assert house.scheduler.statistics().num_following == 0
    house.drain()
    house.check_outcomes()
    assert [cached(stream) for stream in others] == [0, 0, 0]


def test_followers_go_where_their_leader_is() -> None:
    house = House()
    for replica_id in (1, 2):
        house.attach(spec(replica_id, num_device_blocks=60, num_slots=8, max_step_tokens=20))
    leader = house.submit(range(60), max_tokens=2)
    house.step(2)
    house.make_plan(2)  # a third is there, the rest on its way: more than the load of the leader is worth
    follower = house.submit(range(60), max_tokens=2)
    assert house.plan(1).limited_by is Limit.PLACEMENT
    house.drain()
    house.check_outcomes()
    assert {event.replica_id for s in (leader, follower) for event in s.events if isinstance(event, Scheduled)} == {2}


def test_under_fcfs_priority_holds_nobody_off_a_leader() -> None:
    house = roomy(policy=SchedulingPolicy.FCFS)
    house.submit(range(37), max_tokens=2, priority=5)
    house.make_plan()
    follower = house.submit(range(37), max_tokens=2, priority=0)
    house.plan()
    assert house.scheduler.statistics().num_following == 1
    house.drain()
    house.check_outcomes()
    assert cached(follower) == 36


def test_a_suspect_of_a_crash_computes_its_prompt_itself() -> None:
    """What it crashed the replica with may have been that prompt: then it is to crash it again, and be named."""
    house = roomy()
    first, suspect = (house.submit(range(37), max_tokens=2, crash_group_sizes=(4,)) for _ in range(2))
    assert len(house.make_plan().admissions) == 2
    assert house.scheduler.statistics().num_following == 0
    house.drain()
    house.check_outcomes()
    assert (cached(first), cached(suspect)) == (0, 0)
