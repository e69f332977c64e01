"""The fair policy: tenants get their shares, whatever one of them sends."""

from __future__ import annotations

import pytest

from scheduler_svc.core.limits import SchedulingPolicy
from scheduler_svc.core.queue import FairQueue
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.types import CoreLimits, Request
from tests.core.house import House, spec


def fair(weights: dict[str, float] | None = None, **changes: int) -> House:
    limits = CoreLimits(
        policy=SchedulingPolicy.FAIR,
        tenant_weights=weights or {},
        max_waiting=10_000,
        expected_output_tokens=0,
    )
    house = House(limits)
    house.attach(spec(num_device_blocks=64, **changes))
    return house


def served(house: House, num_steps: int) -> dict[str, int]:
    for step in range(num_steps):
        house.checks_laws = step % 20 == 0
        house.step()
    tenants = house.scheduler.statistics().tenants
    assert all(tenants[name].num_waiting for name in ("many", "few")), "both must be backlogged"
    return {name: tenants[name].num_served_tokens for name in ("many", "few")}


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_ten_times_the_requests_get_no_more_than_the_share(weight: float) -> None:
    house = fair({"few": weight})
    house.checks_laws = False
    for n in range(1500):
        tenant = "few" if n % 11 == 0 else "many"
        house.submit([n % 7] * (3 + n % 5), max_tokens=4 + n % 6, tenant=tenant)
    tokens = served(house, num_steps=150)
    assert tokens["few"] / weight == pytest.approx(tokens["many"], rel=0.1)


def test_a_tenant_that_comes_late_is_not_paid_for_the_past() -> None:
    house = fair(num_slots=2)
    for n in range(200):
        house.submit([n % 7] * 4, max_tokens=6, tenant="many")
    for _ in range(60):
        house.step()
    before = house.scheduler.statistics().tenants["many"].num_served_tokens
    for n in range(200):
        house.submit([n % 7] * 4, max_tokens=6, tenant="few")
    tokens = served(house, num_steps=60)
    assert tokens["few"] == pytest.approx(tokens["many"] - before, rel=0.15)


def test_tokens_are_charged_once_though_they_are_computed_again() -> None:
    house = fair(num_slots=8)
    house.detach(1)
    house.attach(spec(2, num_device_blocks=8, num_slots=8))
    streams = [house.submit([n, n + 1, n + 2], max_tokens=20, tenant="t") for n in range(4)]
    house.drain()
    house.check_outcomes(num_cache_tokens=32)
    assert house.scheduler.statistics().replicas[0].num_preemptions > 0
    num_tokens = sum(3 + len(stream.received) for stream in streams)
    assert house.scheduler.statistics().tenants["t"].num_served_tokens == num_tokens


def test_cached_tokens_are_not_charged() -> None:
    house = fair()
    for expected in (20 + 1, 20 + 1 + 4 + 1):  # of the second, 16 of 20 are cached
        house.submit(range(20), max_tokens=1, tenant="t")
        house.drain()
        assert house.scheduler.statistics().tenants["t"].num_served_tokens == expected


def test_a_preempted_sequence_is_charged_for_what_it_got() -> None:
    house = fair(num_slots=1)
    stream = house.submit([1], max_tokens=30, tenant="t", priority=1)
    for _ in range(3):
        house.step()
    house.submit([2, 3], max_tokens=30, tenant="t")
    house.step()
    assert not stream.is_running
    assert house.scheduler.statistics().tenants["t"].num_served_tokens == (1 + 3) + (2 + 1)


def test_inside_a_tenant_priority_goes_first_and_displaces_only_its_own() -> None:
    house = fair(num_slots=1)
    running = house.submit([1], max_tokens=30, tenant="a", priority=1)
    house.step()
    foreign = house.submit([2], max_tokens=1, tenant="b", priority=-1)
    house.step()
    assert (running.is_running, foreign.is_running) == (True, False)
    house.cancel(foreign)
    own = house.submit([3], max_tokens=3, tenant="a", priority=0)
    house.step()
    assert (running.is_running, own.is_running) == (False, True)


def _sequence(number: int, tenant: str, num_tokens: int = 10) -> Sequence:
    return Sequence(Request(number, "model", [1] * num_tokens, 5, tenant=tenant), now=number, ticket=number)


def test_the_queue_alternates_between_tenants_of_equal_service() -> None:
    queue = FairQueue({"b": 2.0})
    for number, tenant in enumerate("aaaabbbbc"):
        queue.add(_sequence(number, tenant))
    order = [sequence.request.tenant for sequence in queue]
    assert order == ["a", "b", "c", "b", "a", "b", "b", "a", "a"]
    assert queue[0].request.tenant == "a"
    queue.charge("a", 1000)
    assert [sequence.request.tenant for sequence in queue] == ["b", "c", "b", "b", "b", "a", "a", "a", "a"]
    late = _sequence(9, "a")
    assert queue.position(late) == 4 + 4 + 1
    with pytest.raises(ValueError, match="does not wait"):
        queue.remove(late)


def test_tenants_without_work_or_debt_are_forgotten() -> None:
    queue = FairQueue({})
    queue.add(_sequence(0, "steady"))
    for number in range(1, 1000):
        sequence = _sequence(number, f"tenant-{number}")
        queue.add(sequence)
        queue.remove(sequence)
        queue.charge(f"tenant-{number}", 1)
        queue.charge("steady", 2)
    assert len(queue.served()) < 200


def test_places_are_told_by_weight() -> None:
    queue = FairQueue({"b": 2.0})
    sequences = [_sequence(number, tenant) for number, tenant in enumerate("aaaabbbb")]
    for sequence in sequences:
        queue.add(sequence)
    assert [queue.position(sequence) for sequence in sequences] == [1, 4, 6, 7, 0, 2, 3, 5]


def test_a_tenant_in_debt_is_not_forgotten() -> None:
    queue = FairQueue({})
    queue.add(_sequence(0, "steady"))
    queue.charge("debtor", 10_000)
    for number in range(200):
        queue.charge(f"tenant-{number}", 1)
        queue.charge("steady", 2)
    queue.add(_sequence(1, "debtor"))
    queue.charge("steady", 100)  # which the other is still ahead by far
    assert [sequence.request.tenant for sequence in queue] == ["steady", "debtor"]
    assert queue.served()["debtor"] == 10_000


def test_who_comes_where_nobody_waits_begins_where_the_last_one_left() -> None:
    queue = FairQueue({})
    old = _sequence(0, "old")
    queue.add(old)
    queue.charge("old", 1000)
    queue.remove(old)
    new = _sequence(1, "new")
    queue.add(new)
    queue.add(_sequence(2, "old"))
    queue.charge("new", 1)
    assert queue[0].request.tenant == "old"


def test_service_is_a_change_of_the_order() -> None:
    """What did not fit is looked at anew when another goes first."""
    queue = FairQueue({})
    queue.add(_sequence(0, "t"))
    before = queue.num_changes
    queue.charge("t", 10)
    assert queue.num_changes > before


def test_ties_rotate_whatever_the_names() -> None:
    queue = FairQueue({})
    for number, tenant in enumerate("zyx" * 4):
        queue.add(_sequence(number, tenant))
    order = []
    for _ in range(9):
        first = queue[0]
        order.append(first.request.tenant)
        queue.remove(first)
        queue.charge(first.request.tenant, 10)
    assert "".join(order) == "zyx" * 3
