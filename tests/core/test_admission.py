"""What is accepted, what is refused at once, who starts first, and where."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_svc.core.group_places import GroupPlaces
from scheduler_svc.core.plan import Limit
from scheduler_svc.core.types import (
    CoreLimits,
    Finished,
    FinishReason,
    IllegalTransition,
    Queued,
    RefusalReason,
    Refused,
    Request,
    Scheduled,
)
from tests.core.house import House, Stream, spec


def refusal(house: House, *args: object, **fields: object) -> Refused:
    with pytest.raises(Refused) as caught:
        house.submit(*args, **fields)  # type: ignore[arg-type]
    return caught.value


def replica_of(stream: Stream) -> int:
    return next(event.replica_id for event in stream.events if isinstance(event, Scheduled))


def test_a_model_that_no_replica_ever_served_is_refused() -> None:
    house = House()
    assert refusal(house, [1]).reason is RefusalReason.UNKNOWN_MODEL
    house.attach(spec())
    refused = refusal(house, [1], model="other")
    assert (refused.field, refused.value, refused.limit) == ("model", "other", "model")
    assert house.scheduler.sequences == {}


def test_a_known_model_without_replica_waits_for_one() -> None:
    house = House()
    house.attach(spec(1))
    house.detach(1)
    stream = house.submit([1, 2, 3])
    assert house.scheduler.statistics().num_waiting == {"model": 1}
    house.attach(spec(2))
    house.drain()
    house.check_outcomes()
    assert replica_of(stream) == 2


@pytest.mark.parametrize(
    ("changes", "longest", "name"),
    [({"num_device_blocks": 4}, 15, "KV cache"), ({"max_model_len": 12}, 11, "max_model_len")],
)
def test_a_prompt_that_can_never_fit_is_refused(changes: dict[str, int], longest: int, name: str) -> None:
    house = House()
    house.attach(spec(**changes))
    refused = refusal(house, range(longest + 1))
    assert (refused.reason, refused.value, refused.limit) == (RefusalReason.TOO_LONG, longest + 2, longest + 1)
    assert name in str(refused)
    stream = house.submit(range(longest), max_tokens=50)  # max_tokens is not reserved
    house.drain()
    assert len(stream.received) == (2 if name == "KV cache" else 1)


def test_a_resumed_sequence_that_holds_all_that_fits_is_complete() -> None:
    house = House()
    house.attach(spec(num_device_blocks=2))
    stream = house.submit([1, 2, 3], max_tokens=50)
    house.drain()
    again = house.submit([1, 2, 3], max_tokens=50, prior_token_ids=tuple(stream.received), attempt=2)
    again_events = again.events
    assert again_events == [Finished(2, 6, FinishReason.LENGTH)]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"prompt_token_ids": ()}, "prompt_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2, "prior_token_ids": (1, 2)}, "max_tokens"),
        ({"attempt": 0}, "attempt"),
        ({"age_ns": -1}, "age_ns"),
        ({"group_size": 2}, "group_id"),
        ({"group_size": 0}, "group_size"),
        ({"prompt_token_ids": (1, -1)}, "token id"),
        ({"prompt_token_ids": (1, 1 << 32)}, "token id"),
    ],
)
def test_a_field_out_of_range_is_refused_by_name(fields: dict[str, object], name: str) -> None:
    house = House()
    house.attach(spec())
    fields = dict(fields)
    refused = refusal(house, [1], **fields)
    assert refused.reason is RefusalReason.INVALID
    assert name in refused.field
    assert house.scheduler.sequences == {}


def test_one_that_crashed_replicas_alone_is_not_tried_again() -> None:
    house = House()
    house.attach(spec())
    house.submit([1], crash_group_sizes=(4, 2, 1))
    assert refusal(house, [1], crash_group_sizes=(4, 2, 1, 1)).reason is RefusalReason.POISON


def test_the_queue_is_bounded_and_resumed_ones_pass() -> None:
    house = House(CoreLimits(max_waiting=2))
    house.attach(spec())
    house.submit([1])
    house.submit([2])
    refused = refusal(house, [3])
    assert (refused.reason, refused.limit) == (RefusalReason.QUEUE_FULL, 2)
    house.submit([3], attempt=2)
    house.plan()
    house.submit([4])


def test_the_queue_is_bounded_in_tokens() -> None:
    house = House(CoreLimits(max_waiting_tokens=10))
    house.attach(spec())
    first = house.submit(range(20))  # alone it may always wait
    assert refusal(house, [1]).reason is RefusalReason.QUEUE_FULL
    house.cancel(first)
    house.submit(range(8))
    house.submit([1, 2])
    assert refusal(house, [1]).field == "waiting tokens"


def test_a_group_is_accepted_or_refused_as_one() -> None:
    house = House(CoreLimits(max_waiting=3))
    house.attach(spec())
    first = house.submit([1], group_id="g", group_size=3)
    refusal(house, [9])  # the group's places are kept
    house.submit([1], group_id="g", group_size=3)
    refusal(house, [9])
    house.cancel(first)
    house.submit([9])  # a group that lost a member keeps no places
    assert refusal(house, [1], group_id="h", group_size=2).reason is RefusalReason.QUEUE_FULL


@pytest.mark.parametrize("limits", [CoreLimits(max_waiting=3), CoreLimits(max_waiting_per_tenant=3)])
def test_a_group_larger_than_the_limit_waits_where_nobody_does(limits: CoreLimits) -> None:
    house = House(limits)
    house.attach(spec())
    house.submit([9])
    assert refusal(house, [1], group_id="g", group_size=4).reason is RefusalReason.QUEUE_FULL
    house.drain()
    for _ in range(4):
        house.submit([1], group_id="g", group_size=4)
    refusal(house, [9])
    house.drain()


def test_a_late_member_of_a_group_is_let_in_and_takes_one_place() -> None:
    house = House(CoreLimits(max_waiting=3))
    house.attach(spec())
    member: dict[str, Any] = {"group_id": "g", "group_size": 3}
    house.submit([1], max_tokens=1, **member)
    house.drain()  # its places are given up: who knows whether the others come
    house.submit([9])
    house.submit([9])
    house.submit([1], **member)
    places = house.scheduler.room.group_places
    assert (house.scheduler.room.num_waiting, places.total.num_sequences) == (3, 0)
    refusal(house, [9])
    house.submit([1], **member)  # the first was accepted on behalf of all three
    assert refusal(house, [1], **member).reason is RefusalReason.QUEUE_FULL


def test_places_of_a_group_count_for_its_tenant_and_in_tokens() -> None:
    house = House(CoreLimits(max_waiting_per_tenant=3, max_waiting_tokens=20))
    house.attach(spec())
    members: dict[str, Any] = {"group_id": "g", "group_size": 3, "tenant": "a"}
    house.submit([1, 2, 3, 4, 5], **members)
    assert "tenant 'a'" in str(refusal(house, [9], tenant="a"))
    assert "waiting tokens" in str(refusal(house, [9] * 6, tenant="b"))
    house.submit([9] * 5, tenant="b")
    second = house.submit([1, 2, 3, 4, 5], **members)
    house.cancel(second)  # nobody is to come any more
    house.submit([9] * 5, tenant="b")
    house.submit([9], tenant="a")


def test_tokens_kept_for_a_group_count_for_its_tenant() -> None:
    house = House(CoreLimits(max_waiting_tokens_per_tenant=20))
    house.attach(spec())
    house.submit([1] * 5, group_id="g", group_size=3, tenant="a")
    assert "waiting tokens of tenant 'a'" in str(refusal(house, [9] * 6, tenant="a"))
    house.submit([9] * 5, tenant="a")


def test_groups_of_two_routers_are_two_whatever_they_are_called() -> None:
    house = House(CoreLimits(max_waiting=3))
    house.attach(spec())
    house.submit([1], group_id="g", group_size=2, router_id=1)
    house.submit([1], group_id="g", group_size=1, router_id=2)
    refusal(house, [1], group_id="g", group_size=2, router_id=2)
    house.submit([1], group_id="g", group_size=2, router_id=1)


def test_a_resumed_member_of_a_group_takes_no_place_of_it() -> None:
    house = House(CoreLimits(max_waiting=3))
    house.attach(spec())
    members: dict[str, Any] = {"group_id": "g", "group_size": 2}
    house.submit([1], **members)
    house.submit([1], attempt=2, **members)
    refusal(house, [9])  # the second member's place is kept
    assert refusal(house, [1], attempt=2, deadline_ns=0, **members).reason is RefusalReason.DEADLINE
    house.submit([1], **members)


def test_late_members_are_expected_of_the_latest_groups_alone() -> None:
    places = GroupPlaces()
    requests = [Request(n, "model", [1], 5, group_id=f"g{n}", group_size=2) for n in range(2000)]
    for request in requests:
        places.note_accepted(request)
        places.note_ended(request)
    assert (places.has_for(requests[0]), places.has_for(requests[-1])) == (False, True)
    assert places.check()


def test_order_is_priority_then_age_then_submission() -> None:
    house = House(CoreLimits(max_num_seqs=1))
    house.attach(spec())
    house.now = 10_000
    streams = {
        "late": house.submit([1], max_tokens=1, priority=1),
        "plain": house.submit([2], max_tokens=1),
        "second": house.submit([3], max_tokens=1),
        "resumed": house.submit([4], max_tokens=2, age_ns=9_000, attempt=2, prior_token_ids=()),
        "urgent": house.submit([5], max_tokens=1, priority=-1),
    }
    house.drain()
    house.check_outcomes()
    started = sorted(
        streams, key=lambda name: next(e.queue_ns for e in streams[name].events if isinstance(e, Scheduled))
    )
    assert started == ["urgent", "resumed", "plain", "second", "late"]


def test_queued_tells_the_position() -> None:
    house = House()
    house.attach(spec())
    assert house.submit([1]).events == []
    assert house.submit([2], queue_events=True).events == [Queued(2, 1)]
    assert house.submit([3], queue_events=True, priority=-1).events == [Queued(3, 0)]


def test_f42_ids_are_the_servers_own() -> None:
    house = House()
    house.attach(spec())
    same = [house.submit([n, n, n], request_id="dup", stream_key=n) for n in (1, 2)]
    with pytest.raises(IllegalTransition, match="in use"):
        house.scheduler.submit(same[0].request, 0)
    house.cancel(same[0])
    house.submit([3, 3], request_id="dup")
    house.drain()
    house.check_outcomes()
    assert same[1].received != []


def test_f34_a_big_prompt_does_not_block_small_ones_nor_they_it() -> None:
    house = House(CoreLimits(max_overtakes=3, expected_output_tokens=0))
    house.attach(spec(num_device_blocks=16, num_slots=8))
    running = house.submit(range(28), max_tokens=12)  # half the pool, and more later
    for _ in range(3):
        house.step()
    big = house.submit(range(40, 96), max_tokens=2)
    small = [house.submit([n, n], max_tokens=2) for n in range(6)]
    planned = house.step()
    assert planned.limited_by is Limit.BLOCKS
    assert [stream.is_running for stream in small] == [True] * 3 + [False] * 3  # three went before, no more do
    for _ in range(12):
        assert not any(stream.is_running for stream in small[3:])
        house.step()
        if big.is_running:
            break
    assert big.is_running
    assert not running.is_live
    house.drain()
    house.check_outcomes()


@pytest.mark.parametrize(("num_big", "is_reached"), [(15, True), (16, False)])
def test_few_are_looked_at_to_find_one_that_fits(num_big: int, is_reached: bool) -> None:
    """So that a step costs no more however many wait."""
    house = House(CoreLimits(expected_output_tokens=0))
    house.attach(spec(num_slots=8))
    house.submit(range(28), max_tokens=12)
    house.step()
    for n in range(num_big):
        house.submit([n] * 56, max_tokens=2)
    small = house.submit([40], max_tokens=2)
    house.step()
    assert small.is_running is is_reached
    house.drain()
    house.check_outcomes()


def test_f34_a_long_prefill_and_short_arrivals_both_go_on() -> None:
    house = House()
    house.attach(spec(num_device_blocks=200, max_step_tokens=16, max_model_len=800, num_slots=8))
    long = house.submit([n % 40 for n in range(480)], max_tokens=1)  # 30 steps of its own
    house.step()
    for n in range(10):
        short = house.submit([n, n, n], max_tokens=1)
        house.step()
        assert not short.is_live  # started and finished in the next step
    for _ in range(29):  # 40 in all
        house.step()
    assert not long.is_live


def test_f34_decodes_do_not_park_a_prefill() -> None:
    house = House()
    house.attach(spec(num_device_blocks=100, max_step_tokens=9, num_slots=9))
    for n in range(8):
        house.submit([n], max_tokens=60)
    house.step()
    prompt = house.submit(range(14), max_tokens=1)
    for _ in range(14):  # one token of the nine is left in each step
        house.step()
    assert not prompt.is_live


@pytest.fixture
def pair() -> House:
    """Two replicas, of which the second has 16 tokens of a prompt cached, and is idle."""
    house = House()
    for replica_id in (1, 2):
        house.attach(spec(replica_id, num_slots=2, num_device_blocks=64))
    house.detach(1)
    house.submit(range(17), max_tokens=1)
    house.step(2)
    house.step(2)
    house.attach(spec(1, num_slots=2, num_device_blocks=64))
    return house


def test_placement_goes_to_the_longest_prefix(pair: House) -> None:
    follower = pair.submit(range(17), max_tokens=40)
    assert pair.plan(1).limited_by is Limit.PLACEMENT
    pair.step(2)
    assert replica_of(follower) == 2


def test_load_in_tokens_outweighs_a_prefix(pair: House) -> None:
    pair.submit(range(10, 50), max_tokens=1)
    assert pair.plan(2).plan is not None  # 40 tokens on their way there
    follower = pair.submit(range(17), max_tokens=40)
    pair.step(1)
    assert replica_of(follower) == 1


def test_a_prefix_on_a_replica_without_room_is_not_waited_for(pair: House) -> None:
    for _ in range(2):
        pair.submit(range(17), max_tokens=80)
        pair.step(2)
    follower = pair.submit(range(17), max_tokens=40)
    pair.step(1)
    assert replica_of(follower) == 1


def test_idle_replicas_share_a_burst() -> None:
    house = House()
    for replica_id in (1, 2):
        house.attach(spec(replica_id, max_step_tokens=64, num_slots=8, num_device_blocks=64))
    streams = [house.submit([n] * 10, max_tokens=1) for n in range(6)]
    house.plan(1)
    house.plan(2)
    assert sorted(replica_of(stream) for stream in streams if stream.is_running) == [1, 1, 1, 2, 2, 2]
    house.drain()
    house.check_outcomes()


def test_models_do_not_mix() -> None:
    house = House()
    house.attach(spec(1))
    house.attach(spec(2, model="other"))
    stream = house.submit([1, 2], model="other")
    assert house.plan(1).limited_by is Limit.NOTHING_WAITING
    house.drain()
    assert replica_of(stream) == 2
