"""What an operator is told of a sequence and of a replica."""

from __future__ import annotations

from scheduler_svc.core.types import CoreLimits
from tests.core.house import House, spec


def test_every_decision_about_a_sequence_is_told_with_its_reason() -> None:
    house = House()
    house.attach(spec(num_slots=1))
    stream = house.submit([1, 2, 3, 4, 5], max_tokens=9, priority=1, request_id="r")
    house.step()
    house.submit([7], max_tokens=1)
    house.step()
    waiting = house.scheduler.explain(1)
    assert waiting is not None
    assert (waiting.request_id, waiting.state, waiting.position) == ("r", "waiting", 0)
    assert "replica-1" in waiting.waits_for
    house.update(stream, priority=-2)
    house.drain()
    told = house.scheduler.explain(1)
    assert told is not None
    assert [decision.what for decision in told.decisions] == [
        "queued", "scheduled", "preempted", "updated", "scheduled", "finished: LENGTH",
    ]  # fmt: skip
    preempted, updated, again = told.decisions[2:5]
    assert updated.reason == "priority -2, no deadline"
    assert "better priority" in preempted.reason
    assert (preempted.num_blocks, preempted.replica_id) == (2, 1)
    assert (again.num_cached_tokens, again.num_recomputed_tokens) == (4, 1)
    assert (told.state, told.num_output_tokens, told.priority) == ("ended", 9, -2)


def test_what_a_waiting_sequence_needs_is_named() -> None:
    house = House()
    house.attach(spec(num_device_blocks=8, num_slots=2, max_step_tokens=64))
    house.submit(range(20), max_tokens=4)
    house.step()
    big = house.submit(range(30, 54), max_tokens=4)
    house.step()
    told = house.scheduler.explain(big.request.sequence_id)
    assert told is not None
    assert told.waits_for == "replica-1: 4 more KV blocks than the 2 that are free"
    follower = house.submit([*range(16), 49], max_tokens=4)
    house.detach(1)
    told = house.scheduler.explain(follower.request.sequence_id)
    assert told is not None
    assert told.waits_for == "a replica of model 'model'"


def test_a_follower_names_its_leader() -> None:
    house = House()
    house.attach(spec())
    house.submit(range(20), max_tokens=4)
    house.submit(range(20), max_tokens=4)
    house.make_plan()
    told = house.scheduler.explain(2)
    assert told is not None
    assert told.waits_for == "sequence 1, which computes the 4 blocks that they share"
    assert told.decisions[-1].what == "follows"


def test_histories_are_bounded() -> None:
    house = House(CoreLimits(max_explained=2))
    house.attach(spec())
    first = house.submit([1], max_tokens=2)
    for n in range(100):
        house.update(first, priority=n % 3)
    told = house.scheduler.explain(1)
    assert told is not None
    assert (len(told.decisions), told.num_forgotten) == (32, 101 - 32)
    assert told.decisions[0].what == "queued"
    for n in range(3):
        house.submit([n], max_tokens=1)
    house.drain()
    assert house.scheduler.explain(1) is None or house.scheduler.explain(2) is None
    assert house.scheduler.explain(77) is None


def test_statistics_count_what_was_done() -> None:
    house = House()
    house.attach(spec(num_slots=2))
    streams = [house.submit([n] * 5, max_tokens=4, tenant="t") for n in range(3)]
    house.step()
    statistics = house.scheduler.statistics()
    assert statistics.tenants["t"].num_waiting == 1
    house.drain()
    replica = house.scheduler.statistics().replicas[0]
    assert replica.num_sampled_tokens == sum(len(stream.received) for stream in streams)
    assert replica.num_computed_tokens == 3 * (5 + 3)
    assert replica.num_steps_by_limit["slots"] > 0
    assert sum(replica.num_steps_by_limit.values()) == replica.num_steps
