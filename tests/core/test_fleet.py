"""Several replicas and models: draining one, and keeping apart what may crash them."""

from __future__ import annotations

import pytest

from scheduler_svc.core.plan import Limit
from scheduler_svc.core.types import CoreLimits, IllegalTransition, Scheduled
from tests.core.house import House, Stream, spec


def replicas_of(stream: Stream) -> list[int]:
    return [event.replica_id for event in stream.events if isinstance(event, Scheduled)]


def test_a_draining_replica_finishes_what_runs_and_its_queue_goes_elsewhere() -> None:
    house = House()
    for replica_id in (1, 2):
        house.attach(spec(replica_id, num_slots=1))
    running = house.submit(range(9), max_tokens=6)
    house.step(1)
    house.drain_replica(1)
    moved = [house.submit([*range(8), n], max_tokens=6) for n in range(3)]
    assert house.plan(1).limited_by is Limit.DRAINING
    house.drain()
    house.check_outcomes()
    assert replicas_of(running) == [1]
    assert [replicas_of(stream) for stream in moved] == [[2]] * 3
    draining = house.scheduler.statistics().replicas[0]
    assert (draining.is_draining, draining.num_running) == (True, 0)


def test_followers_of_a_draining_replica_do_not_wait_for_it() -> None:
    house = House()
    house.attach(spec(1, num_device_blocks=60))
    house.submit(range(37), max_tokens=2)
    house.make_plan(1)
    follower = house.submit(range(37), max_tokens=2)
    house.plan(1)
    house.attach(spec(2, num_device_blocks=60))
    house.drain_replica(1)
    house.make_plan(2)
    assert replicas_of(follower) == [2]


def test_promises_to_a_draining_replica_are_void() -> None:
    house = House()
    house.attach(spec(2))
    house.submit(range(17), max_tokens=1)
    house.step(2)
    house.attach(spec(1))
    stream = house.submit(range(17), max_tokens=4)
    assert house.plan(1).limited_by is Limit.PLACEMENT
    house.drain_replica(2)
    house.make_plan(1)
    assert replicas_of(stream) == [1]


def test_an_idle_replica_does_not_leave_work_to_one_that_keeps_room() -> None:
    house = House()
    house.attach(spec(1, num_device_blocks=12, num_slots=8, max_step_tokens=64))
    shared = list(range(8))
    for n in range(5):
        house.submit([*shared, n, n, n], max_tokens=20)
    while not house.scheduler.replicas[1].growth.is_on:
        house.step(1)
    stream = house.submit([*shared, 30], max_tokens=20)
    house.attach(spec(2, num_device_blocks=12, num_slots=8, max_step_tokens=64))
    for _ in range(3):
        house.step(2)
    assert replicas_of(stream) == [2]


def test_draining_what_is_not_attached_is_an_error() -> None:
    with pytest.raises(IllegalTransition, match="not attached"):
        House().scheduler.drain(1, 0)


def test_suspects_run_in_groups_of_half_the_last_size_until_each_has_a_token() -> None:
    house = House()
    house.attach(spec(1, num_slots=8, num_device_blocks=64, max_step_tokens=32))
    streams = [house.submit([n, n, n], max_tokens=9) for n in range(8)]
    house.make_plan()
    house.detach(1)
    assert {stream.request.crash_group_sizes for stream in streams} == {(8,)}
    house.attach(spec(2, num_slots=8, num_device_blocks=64, max_step_tokens=32))
    innocent = house.submit([9], max_tokens=20)
    planned = house.plan(2)
    assert planned.plan is not None
    assert (len(planned.plan.row_slots), planned.limited_by) == (4, Limit.SUSPECTS)
    house.run(2)
    house.complete(2)  # those four are cleared
    house.make_plan(2)
    assert sum(stream.is_running for stream in streams) == 4  # rows in flight are too many for the others
    house.drain()
    house.check_outcomes()
    assert innocent.finish is not None


def test_poison_is_alone_after_few_crashes_and_everyone_else_gets_through() -> None:
    house = House(CoreLimits(max_overtakes=2))
    house.may_be_poison = True
    poison = None
    num_crashes = 0
    for n in range(16):
        stream = house_submit(house, n)
        poison = poison or stream
    assert poison is not None
    for replica_id in range(2, 20):
        if not poison.is_live:
            break
        house.attach(spec(replica_id, num_slots=16, num_device_blocks=128, max_step_tokens=64))
        for _ in range(200):
            house.plan(replica_id)
            if poison.is_running:
                sizes = poison.request.crash_group_sizes
                num_rows = len(house.scheduler.replicas[replica_id].rows.running)
                assert not sizes or num_rows <= max(1, sizes[-1] // 2)
                num_crashes += 1
                house.detach(replica_id)
                break
            house.run(replica_id)
            house.complete(replica_id)
    assert not poison.is_live
    assert list(poison.request.crash_group_sizes)[-2:] == [1, 1]
    assert num_crashes <= 6  # 16, 8, 4, 2, 1, 1
    house.attach(spec(99, num_slots=16, num_device_blocks=128))
    house.drain()
    house.check_outcomes(num_cache_tokens=512)


def house_submit(house: House, n: int) -> Stream:
    if not house.scheduler.replicas and n == 0:
        house.attach(spec(1, num_slots=16, num_device_blocks=128))
        house.detach(1)
    return house.submit([n % 40, n % 7], max_tokens=30)
