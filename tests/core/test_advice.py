"""The lines that tell an operator what holds the load up, and which setting changes it."""

from __future__ import annotations

import pytest

from scheduler_svc.core.plan import Limit
from scheduler_svc.core.types import CoreLimits
from tests.core.house import House, Stream, spec


def test_a_queue_that_grows_for_a_minute_is_said_once_with_the_setting_that_helps() -> None:
    house = House(CoreLimits(max_num_seqs=1))
    house.attach(spec())
    lines: list[str] = []
    for second in range(130):
        house.now = second * 10**9
        house.submit([second % 7, 1], max_tokens=3)
        house.step()
        lines += house.tick()
    assert len(lines) == 1
    assert "the queue grew" in lines[0]
    assert "--max-num-seqs" in lines[0]


def test_a_queue_without_replica_asks_for_one() -> None:
    house = House()
    house.attach(spec())
    house.detach(1)
    lines: list[str] = []
    for second in range(70):
        house.now = second * 10**9
        house.submit([1, 2])
        lines += house.tick()
    assert len(lines) == 1
    assert "no replica is attached" in lines[0]


def waits_for_a_minute(house: House, num_waiting: list[int]) -> list[str]:
    """What is said while so many wait for the model, a number each ten seconds."""
    lines: list[str] = []
    streams: list[Stream] = []
    for num in num_waiting:
        house.now += 10 * 10**9
        while len(streams) > num:
            house.cancel(streams.pop())
        streams += [house.submit([1, 2]) for _ in range(num - len(streams))]
        lines += house.tick()
    return lines


@pytest.mark.parametrize(
    ("num_waiting", "num_lines"),
    [
        ([5] * 9, 0),  # long, and no longer than it was
        ([1, 2, 3, 4, 5, 6], 0),  # fifty seconds
        ([1, 2, 3, 4, 5, 6, 7], 1),
        ([9, 1, 1, 1, 1, 1, 8], 0),  # was longer a minute ago
        ([1, 2, 3, 0, 5, 6, 7, 8], 0),  # was empty since
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 1),  # said once
        ([1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7], 2),  # and again on the next occasion
    ],
)
def test_a_queue_must_have_grown_for_a_minute(num_waiting: list[int], num_lines: int) -> None:
    house = House()
    house.attach(spec())
    house.detach(1)
    assert len(waits_for_a_minute(house, num_waiting)) == num_lines


def test_advice_names_what_stopped_most_steps_of_the_last_minutes_and_of_this_model() -> None:
    house = House()
    house.attach(spec())
    house.attach(spec(2, model="other"))
    own, other = house.scheduler.replicas[1].counters.limits, house.scheduler.replicas[2].counters.limits
    own[Limit.BLOCKS] = 1000  # long ago
    house.now = 10**9
    house.submit([1, 2])
    house.tick()
    own.update({Limit.SLOTS: 20, Limit.TOKENS: 30, Limit.NOTHING_WAITING: 500})
    other[Limit.PREFILL_CAP] = 900
    (line,) = waits_for_a_minute(house, list(range(1, 8)))
    assert "the token budget is short: raise --max-num-batched-tokens, or add a replica" in line


def test_kept_room_is_said_on_each_occasion() -> None:
    house = House()
    house.attach(spec())
    growth = house.scheduler.replicas[1].growth
    for _ in range(2):
        growth.note_refusal()
        assert len(house.tick()) == 1
        assert house.tick() == ()
        growth.note_empty()
        assert house.tick() == ()
