"""What steps look like: chunks, mixed rows, two plans in flight. Small exact examples."""

from __future__ import annotations

from scheduler_svc.core.plan import Limit, StepPlan
from scheduler_svc.core.types import CoreLimits, Finished, FinishReason, Progress, Scheduled
from tests.core.house import House, spec


def rows(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(slot, start, count) of each row."""
    return list(zip(plan.row_slots, plan.row_starts, plan.row_counts, strict=True))


def test_a_prompt_longer_than_the_step_is_computed_in_chunks() -> None:
    house = House()
    house.attach(spec(max_step_tokens=16))
    house.submit(range(20), max_tokens=3)
    first = house.make_plan()
    assert rows(first) == [(0, 0, 16)]
    assert len(first.admissions) == 1
    assert len(first.admissions[0].block_ids) == 5  # for all 20 known tokens
    second = house.make_plan()
    assert rows(second) == [(0, 16, 4)]  # reaches the last known token, so it samples
    assert second.admissions == []
    third = house.make_plan() if house.plan().plan else None
    assert third is None  # two plans are unanswered
    house.run()
    house.complete()
    assert rows(house.make_plan()) == [(0, 20, 1)]  # the token which the second plan samples


def test_chunks_and_single_tokens_share_a_step() -> None:
    house = House()
    house.attach(spec(max_step_tokens=8))
    house.submit([1, 2, 3], max_tokens=9)
    house.step()
    house.submit(range(10, 20), max_tokens=9)
    assert rows(house.make_plan()) == [(0, 3, 1), (1, 0, 7)]
    assert rows(house.make_plan()) == [(0, 4, 1), (1, 7, 3)]


def test_every_running_row_gets_a_token_however_small_the_budget() -> None:
    house = House()
    house.attach(spec(max_step_tokens=2))
    streams = [house.submit([n, n, n, n], max_tokens=4) for n in range(3)]
    for _ in range(3):
        house.step()
    assert [stream.is_running for stream in streams] == [True, True, False]  # no more rows than tokens
    assert rows(house.make_plan()) == [(0, 3, 1), (1, 3, 1)]
    house.drain()
    house.check_outcomes()


def test_a_long_prompt_leaves_a_quarter_of_the_step_to_those_behind_it() -> None:
    house = House()
    house.attach(spec(max_step_tokens=16, num_device_blocks=64))
    house.submit(range(60), max_tokens=2)
    assert rows(house.make_plan()) == [(0, 0, 16)]  # nobody wants the rest
    house.submit([1, 2, 3], max_tokens=2)
    assert rows(house.make_plan()) == [(0, 16, 13), (1, 0, 3)]  # and what they leave comes back


def test_the_next_plan_names_the_token_in_flight() -> None:
    house = House()
    house.attach(spec())
    stream = house.submit([1, 2, 3], max_tokens=4)
    assert rows(house.make_plan()) == [(0, 0, 3)]
    assert rows(house.make_plan()) == [(0, 3, 1)]  # token 3 is not known to the core yet
    assert house.plan().limited_by is Limit.UNANSWERED_PLANS
    assert stream.received == []
    house.drain()
    house.check_outcomes()


def test_a_row_that_will_end_by_length_is_not_planned_again() -> None:
    house = House()
    house.attach(spec())
    house.submit([1, 2, 3], max_tokens=2)
    house.make_plan()
    house.make_plan()
    house.run()
    house.complete()
    assert house.plan().plan is None  # the second token is the last, and in flight
    house.run()
    house.complete()
    assert not house.scheduler.sequences


def test_a_row_that_ended_is_ignored_in_the_plan_already_sent() -> None:
    house = House()
    house.attach(spec())
    stream = house.submit([1, 2, 3], max_tokens=9, end_token_ids=range(50))  # its first sample ends it
    house.make_plan()
    late = house.make_plan()
    assert rows(late) == [(0, 3, 1)]
    house.run()
    house.complete()
    assert stream.outcome == Finished(1, 0, FinishReason.END_TOKEN)
    house.submit([4, 5], max_tokens=1)
    after = house.make_plan()
    assert (after.released_slots, after.admissions[0].slot) == ([0], 0)  # the slot is used again at once
    house.drain()
    house.check_outcomes()


def test_blocks_are_appended_at_their_edges_alone() -> None:
    house = House()
    house.attach(spec(block_size=4))
    house.submit([1, 2, 3], max_tokens=9)
    appended = []
    for _ in range(8):
        plan = house.make_plan()
        appended.append(list(plan.append_counts))
        house.run()
        house.complete()
    # starts: 0 (prompt), 3, 4, 5, 6, 7, 8, 9
    assert appended == [[], [], [1], [], [], [], [1], []]


def test_slots_limit_what_runs() -> None:
    house = House(CoreLimits(max_num_seqs=2))
    house.attach(spec(num_slots=4))
    for n in range(3):
        house.submit([n], max_tokens=2)
    planned = house.plan()
    assert planned.plan is not None
    assert (len(planned.plan.admissions), planned.limited_by) == (2, Limit.SLOTS)


def test_a_step_says_why_it_is_no_bigger() -> None:
    house = House()
    house.attach(spec(max_step_tokens=4))
    assert house.plan().limited_by is Limit.NOTHING_WAITING
    house.submit(range(6), max_tokens=2)
    assert house.plan().limited_by is Limit.TOKENS
    house.submit(range(7, 68), max_tokens=2)
    assert house.plan().limited_by is Limit.BLOCKS


def test_progress_is_reported_now_and_then() -> None:
    house = House(CoreLimits(progress_tokens=8))
    house.attach(spec())
    stream = house.submit([1, 2, 3], max_tokens=40)
    house.drain()
    progress = [event.num_output_tokens for event in stream.events if isinstance(event, Progress)]
    assert progress == [11, 19, 27, 35]  # at the block edges past every 8 tokens


def test_scheduled_tells_the_time_in_the_queue() -> None:
    house = House()
    house.attach(spec())
    stream = house.submit([1, 2, 3])
    house.now = 5000
    house.plan()  # at 6000
    assert stream.events == [Scheduled(1, 1, cached_tokens=0, recomputed_tokens=0, queue_ns=6000)]
