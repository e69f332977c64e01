"""How much may wait, in all and of each tenant; what the refused and the waiting are told."""

from __future__ import annotations

import pytest

from scheduler_svc.core.pace import Pace
from scheduler_svc.core.types import CoreLimits, Queued, RefusalReason, Refused, Scheduled
from tests.core.house import House, Stream, spec


def refusal(house: House, *args: object, **fields: object) -> Refused:
    with pytest.raises(Refused) as caught:
        house.submit(*args, **fields)  # type: ignore[arg-type]
    return caught.value


def test_a_tenant_fills_its_own_part_of_the_queue_and_no_more() -> None:
    house = House(CoreLimits(max_waiting=5, max_waiting_per_tenant=2, max_waiting_tokens_per_tenant=10))
    house.attach(spec())
    for n in range(2):
        house.submit([n], tenant="a")
    refused = refusal(house, [3], tenant="a")
    assert (refused.reason, refused.limit) == (RefusalReason.QUEUE_FULL, 2)
    assert "tenant 'a'" in refused.field
    house.submit(range(9), tenant="b")
    assert refusal(house, [1, 2], tenant="b").field == "waiting tokens of tenant 'b'"
    house.submit([3], tenant="a", attempt=2)  # a resumed one passes
    house.submit([1], tenant="c")
    assert refusal(house, [1], tenant="d").field == "number of waiting sequences"
    assert house.scheduler.statistics().num_refused == {"queue full": 3}


def test_the_retry_delay_is_the_backlog_at_the_pace_of_starts() -> None:
    house = House(CoreLimits(max_waiting=4, max_num_seqs=1))
    house.attach(spec())
    assert [house.submit([n, n], max_tokens=3) for n in range(4)] != []
    first = refusal(house, [1])
    assert first.retry_after_ns == 10**9  # nothing has started yet
    for n in range(40):
        house.step()
        if len(house.scheduler.room.queue("model")) < 4:
            house.submit([n % 7, n % 5], max_tokens=3)
    interval = house.scheduler.statistics().start_interval_ns["model"]
    assert interval == pytest.approx(3000, rel=0.2)  # three steps of 1000 each
    refused = refusal(house, [1])
    assert refused.retry_after_ns == pytest.approx(interval, rel=0.5)
    group = refusal(house, [1], group_id="g", group_size=3)
    assert group.retry_after_ns is not None
    assert group.retry_after_ns >= 2.9 * interval


def test_the_retry_delay_counts_tokens_where_tokens_are_too_many() -> None:
    house = House(CoreLimits(max_waiting_tokens=40, max_num_seqs=1))
    house.attach(spec())
    pace = house.scheduler.room.pace("model")
    pace.note_waiting(0)
    pace.note_starts(1, 10, 1000)  # sequences of ten tokens, one in 1000 ns
    for _ in range(4):
        house.submit([1] * 10)
    assert refusal(house, [1] * 30).retry_after_ns == 3000
    assert refusal(house, [1] * 60).retry_after_ns == 4000  # once nobody waits it is let in, whatever its length
    assert refusal(house, [1] * 10, group_id="g", group_size=2).retry_after_ns == 2000


def test_tokens_are_counted_for_the_whole_group_and_with_those_before_it() -> None:
    house = House(CoreLimits(max_waiting_tokens=20))
    house.attach(spec())
    house.submit([1] * 10)
    assert refusal(house, [1] * 5, group_id="g", group_size=3).value == "10 (and 15 more)"
    assert refusal(house, [1] * 5, prior_token_ids=[1] * 6).value == "10 (and 11 more)"
    house.submit([1] * 5, group_id="h", group_size=2)


def test_the_expected_start_is_as_many_starts_away_as_go_before_it() -> None:
    house = House(CoreLimits(max_num_seqs=1))
    house.attach(spec())
    pace = house.scheduler.room.pace("model")
    pace.note_waiting(0)
    pace.note_starts(1, 10, 1000)
    told = [event_of(house.submit([n], queue_events=True)) for n in range(3)]
    assert [(event.position, event.eta_ns) for event in told] == [(0, 1000), (1, 2000), (2, 3000)]


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_starts_that_found_room_say_nothing_of_how_fast_room_comes(num_replicas: int) -> None:
    """However light the load was, a burst is told its own wait."""
    house = House(CoreLimits(max_num_seqs=1, max_waiting=2))
    for replica_id in range(1, num_replicas + 1):
        house.attach(spec(replica_id))

    def run_until_idle() -> int:
        began_ns = house.now
        while house.scheduler.sequences:
            for replica_id in house.replicas:
                house.step(replica_id)
        return house.now - began_ns

    def fill() -> None:
        for n in range(num_replicas):
            house.submit([n], max_tokens=20)
        for replica_id in house.replicas:
            house.step(replica_id)

    for n in range(10):
        house.submit([n], max_tokens=20)
        alone_ns = run_until_idle()
    fill()
    for n in range(2):
        told = event_of(house.submit([n], queue_events=True))
    assert (told.position, told.eta_ns, refusal(house, [1]).retry_after_ns) == (1, None, 10**9)
    run_until_idle()
    fill()
    told = event_of(house.submit([1], queue_events=True))
    assert told.eta_ns is not None
    assert 0.4 * alone_ns < told.eta_ns < 1.2 * alone_ns


def test_a_burst_that_two_plans_let_in_at_once_has_not_waited() -> None:
    house = House(CoreLimits(max_waiting=6))
    house.attach(spec(num_slots=8, max_step_tokens=16, num_device_blocks=200))
    for n in range(4):
        house.submit([n] * 12, max_tokens=4)
    plans = [house.make_plan(), house.make_plan()]
    assert [len(plan.admissions) for plan in plans] == [3, 1]
    for n in range(6):
        house.submit([n] * 12, max_tokens=4)
    assert refusal(house, [1]).retry_after_ns == 10**9


def test_who_has_started_is_told_no_place() -> None:
    house = House()
    house.attach(spec())
    house.submit([1, 2], max_tokens=30)
    stream = house.submit([3, 4], max_tokens=30, queue_events=True)
    house.step()
    for n in range(3):  # were it asked for, its place would be another now
        house.submit([5, n], priority=-1)
    house.tick()
    assert [type(event) for event in stream.events] == [Queued, Scheduled]


def test_the_pace_counts_only_time_in_which_somebody_waited() -> None:
    pace = Pace()
    assert pace.interval_ns(0) is None
    pace.note_waiting(1000)
    pace.note_starts(1, 10, 1500)
    pace.note_empty()
    pace.note_waiting(900_000)
    pace.note_starts(2, 20, 901_000)
    assert pace.interval_ns(901_000) == 500
    assert pace.interval_ns(905_000) == 4000  # nothing has started for longer than that
    assert pace.retry_after_ns(0, 40, 901_000) == 2000  # tokens of four
    pace.note_starts(20, 400, 941_000)  # one in 2000 ns, of twice the tokens: the earlier ones hardly count any more
    assert pace.interval_ns(941_000) == pytest.approx(2000, rel=0.1)
    assert pace.retry_after_ns(0, 400, 941_000) == pytest.approx(20 * 2000, rel=0.1)
    pace.note_starts(1, 40, 943_000)
    assert pace.retry_after_ns(0, 400, 943_000) == pytest.approx(20 * 2000, rel=0.2)  # and a single one does as little


def test_places_and_times_are_told_when_they_change() -> None:
    house = House(CoreLimits(max_num_seqs=1))
    house.attach(spec())
    house.submit([9, 9], max_tokens=3)
    streams = [house.submit([n], max_tokens=2, queue_events=True) for n in range(3)]
    assert [event_of(stream) for stream in streams] == [Queued(2, 1), Queued(3, 2), Queued(4, 3)]
    house.tick()
    assert len(streams[2].events) == 1  # nothing has changed
    for _ in range(4):
        house.step()
    house.tick()
    told = event_of(streams[2])
    assert told.position == 1
    assert told.eta_ns is not None
    assert told.eta_ns > 0
    house.drain()
    house.check_outcomes()
    house.tick()


def event_of(stream: Stream) -> Queued:
    return [event for event in stream.events if isinstance(event, Queued)][-1]
