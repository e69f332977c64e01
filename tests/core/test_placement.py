"""Which of several replicas takes a sequence: what a cached prefix is worth, and what it is not waited for."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_svc.core.plan import Limit
from scheduler_svc.core.types import CoreLimits, Scheduled
from tests.core.house import House, Stream, spec


def replica_of(stream: Stream) -> int:
    return next(event.replica_id for event in stream.events if isinstance(event, Scheduled))


def with_prefix(limits: CoreLimits | None = None, **second: Any) -> House:
    """Two idle replicas, of which the second has 16 tokens of range(17) cached."""
    house = House(limits)
    house.attach(spec(2, **second))
    house.submit(range(17), max_tokens=1)
    house.step(2)
    house.step(2)
    house.attach(spec(1, num_device_blocks=64))
    return house


def test_who_plans_takes_what_another_has_no_more_of() -> None:
    house = with_prefix()
    house.drain_replica(2)
    for _ in range(2):
        house.submit(range(17), max_tokens=1)
        house.step(1)
        house.step(1)
    house.scheduler.undrain(2, house.now)
    stream = house.submit(range(17), max_tokens=1)
    house.make_plan(1)
    assert replica_of(stream) == 1


def test_a_prefix_is_not_waited_for_where_blocks_are_short() -> None:
    house = with_prefix(num_device_blocks=8)
    house.submit(range(30), max_tokens=2)
    house.make_plan(2)
    house.make_plan(2)
    house.run(2)
    house.complete(2)
    stream = house.submit(range(17), max_tokens=1)
    house.make_plan(1)
    assert replica_of(stream) == 1


def test_a_prefix_is_not_waited_for_where_room_is_kept_for_growth() -> None:
    house = with_prefix(CoreLimits(), num_device_blocks=20)
    house.submit(range(17), max_tokens=60)
    house.step(2)
    stream = house.submit(range(17), max_tokens=60)
    house.make_plan(1)
    assert replica_of(stream) == 1


def test_a_prefix_is_not_waited_for_beside_a_suspect() -> None:
    house = with_prefix()
    house.drain_replica(1)
    house.submit([40, 41], max_tokens=4, crash_group_sizes=(2,))
    house.make_plan(2)
    house.scheduler.undrain(1, house.now)
    stream = house.submit(range(17), max_tokens=1)
    house.make_plan(1)
    assert replica_of(stream) == 1


def test_a_prefix_is_not_waited_for_where_the_rest_cannot_be() -> None:
    house = with_prefix(max_model_len=20)
    stream = house.submit(range(30), max_tokens=1)
    house.make_plan(1)
    assert replica_of(stream) == 1


def test_a_slot_is_promised_once() -> None:
    house = with_prefix(num_slots=1)
    first, second = (house.submit([*range(16), n], max_tokens=1) for n in (40, 41))
    house.make_plan(1)
    house.make_plan(2)
    assert (replica_of(first), replica_of(second)) == (2, 1)


LONG: dict[str, Any] = {"prompt": [*range(16), *range(20, 33)], "max_tokens": 60}
SHORT: dict[str, Any] = {"prompt": [40, 41], "max_tokens": 9}


@pytest.mark.parametrize(
    ("second", "promised", "better"),
    [
        ({"num_slots": 1}, {"prompt": range(17), "max_tokens": 1}, SHORT),
        ({"num_device_blocks": 8}, LONG, {"prompt": range(40, 56), "max_tokens": 9}),
        ({"num_device_blocks": 20}, LONG, {"prompt": range(40, 57), "max_tokens": 60}),
        ({}, LONG, SHORT | {"crash_group_sizes": (2,)}),
        ({}, {"prompt": range(17), "max_tokens": 9, "crash_group_sizes": (2,)}, SHORT),
    ],
    ids=["the slot", "blocks", "room for growth", "rows beside a suspect", "a suspect's being alone"],
)
def test_a_promise_is_void_when_a_better_one_took(
    second: dict[str, Any], promised: dict[str, Any], better: dict[str, Any]
) -> None:
    house = with_prefix(CoreLimits(), **second)
    stream = house.submit(**promised)
    assert house.plan(1).limited_by is Limit.PLACEMENT
    house.drain_replica(1)
    house.submit(priority=-1, **better)
    house.make_plan(2)
    assert not stream.is_running
    house.scheduler.undrain(1, house.now)
    house.make_plan(1)
    assert replica_of(stream) == 1


def test_an_idle_replica_is_better_than_one_that_runs_something() -> None:
    house = House()
    for replica_id in (1, 2):
        house.attach(spec(replica_id))
    house.submit([1], max_tokens=9)
    house.step(1)
    stream = house.submit([2], max_tokens=9)
    assert house.plan(1).limited_by is Limit.PLACEMENT
    house.make_plan(2)
    assert replica_of(stream) == 2


def test_a_promise_is_void_when_its_replica_is_gone() -> None:
    house = with_prefix()
    stream = house.submit(range(17), max_tokens=1)
    assert house.plan(1).limited_by is Limit.PLACEMENT
    house.attach(spec(3))  # so that there is a choice still
    house.detach(2)
    house.make_plan(1)
    assert replica_of(stream) == 1


@pytest.mark.parametrize("small", [{"max_model_len": 20}, {"num_device_blocks": 4}], ids=["short", "few blocks"])
def test_what_is_too_long_for_one_replica_waits_for_another_and_holds_nobody_up(small: dict[str, int]) -> None:
    house = House()
    house.attach(spec(1, num_device_blocks=40))
    house.attach(spec(2, **small))  # the longest sequence is the first's all the same
    long, short = house.submit(range(60), max_tokens=1), house.submit([40], max_tokens=1)
    house.drain_replica(1)  # nor would it go there now
    planned = house.plan(2)
    house.scheduler.undrain(1, house.now)
    assert (planned.limited_by, replica_of(short)) == (Limit.NOTHING_WAITING, 2)
    house.drain()
    house.check_outcomes(num_cache_tokens=160)
    assert replica_of(long) == 1


def test_a_draining_replica_says_so_only_while_somebody_waits() -> None:
    house = House()
    house.attach(spec())
    house.drain_replica(1)
    assert house.plan().limited_by is Limit.NOTHING_WAITING
    house.submit([1])
    assert house.plan().limited_by is Limit.DRAINING
