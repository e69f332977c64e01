"""How sequences end, and that an answer which fits no plan changes nothing."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from scheduler_svc.core.sequence import TRANSITIONS, Move, Sequence, State
from scheduler_svc.core.types import (
    Ended,
    EndReason,
    FinishReason,
    IllegalTransition,
    ReplicaLost,
    Request,
    ResultMismatch,
)
from tests.core.house import House, spec


def test_cancel_frees_blocks_at_once_wherever_the_sequence_is() -> None:
    house = House()
    house.attach(spec(num_slots=1))
    running, waiting = house.submit(range(9)), house.submit(range(9))
    house.step()
    house.cancel(waiting)
    house.cancel(running)
    assert house.scheduler.statistics().replicas[0].num_used_blocks == 0
    assert running.outcome == Ended(1, EndReason.CANCELLED)
    house.cancel(running)  # crossing the end is no error
    house.submit([1], max_tokens=1)
    assert house.make_plan().released_slots == [0]


@pytest.mark.parametrize("seed", range(5))
def test_f40_cancels_at_every_point_leave_nothing_behind(seed: int) -> None:
    random = Random(seed)
    house = House()
    house.attach(spec(num_device_blocks=12, num_slots=6))
    for n in range(60):
        stream = house.submit([n % 7] * random.randint(1, 20), max_tokens=random.randint(1, 12))
        for _ in range(random.randint(0, 6)):
            house.plan()
            if house.replicas[1].inbox:
                house.run()
            if house.results[1]:
                house.complete()
        house.cancel(stream)
        house.submit(stream.request.prompt_token_ids, max_tokens=3)
    house.drain()
    house.check_outcomes(num_cache_tokens=48)
    statistics = house.scheduler.statistics()
    assert statistics.replicas[0].num_free_blocks == statistics.replicas[0].num_blocks
    assert (statistics.num_waiting, statistics.num_waiting_tokens) == ({"model": 0}, 0)


def test_a_lost_replica_names_its_suspects() -> None:
    house = House()
    house.resubmits = False
    house.attach(spec(num_slots=3))
    in_flight = [house.submit([n, n], max_tokens=9) for n in range(2)]
    house.make_plan()
    house.make_plan()
    waiting = [house.submit([n, n], max_tokens=9) for n in range(2, 4)]
    house.detach(1)
    for stream in in_flight:  # two sequences, though each has a row in both plans
        lost = ReplicaLost(1, 2)
        assert stream.outcome == Ended(stream.request.sequence_id, EndReason.REPLICA_LOST, lost)
    assert all(stream.is_live for stream in waiting)


def test_of_what_a_lost_replica_ran_the_best_ends_first() -> None:
    """An order that does not depend on where objects are in memory: a replay makes it again."""
    house = House()
    house.resubmits = False
    house.attach(spec(num_slots=4))
    for priority in (3, 5, 2, 4):
        house.submit([priority], max_tokens=9, priority=priority)
    house.make_plan()
    for priority in (1, 0):  # displace two, which settle
        house.submit([priority], max_tokens=9, priority=priority)
    house.make_plan()
    assert [sequence.state.value for sequence in house.scheduler.sequences.values()].count("settling") == 2
    events = house.scheduler.detach(1, house.now)
    priorities = [house.streams[event.sequence_id].request.priority for event in events]
    assert priorities == [0, 1, 2, 3, 4, 5]


def test_what_ended_and_was_not_delivered_has_not_ended_well() -> None:
    house = House()
    house.resubmits = False
    house.attach(spec()).unreachable_routers = {0}
    stream = house.submit([1, 2], max_tokens=1)
    house.step()
    assert stream.outcome == Ended(1, EndReason.UNDELIVERED)


def test_a_row_in_no_unanswered_plan_is_no_suspect() -> None:
    house = House()
    house.resubmits = False
    house.attach(spec())
    stream = house.submit([1, 2], max_tokens=9)
    house.step()
    house.detach(1)
    assert stream.outcome == Ended(1, EndReason.REPLICA_LOST, ReplicaLost(1, 0))


def test_a_stream_goes_on_over_lost_replicas() -> None:
    house = House()
    stream = None
    for replica_id in range(1, 6):
        house.attach(spec(replica_id))
        stream = stream or house.submit([1, 2, 3], max_tokens=30)
        for _ in range(3):
            house.step(replica_id)
        house.plan(replica_id)
        house.run(replica_id)  # the tokens arrive, the result is lost
        house.detach(replica_id)
    house.attach(spec(6))
    house.drain()
    house.check_outcomes()
    assert stream is not None
    assert stream.request.attempt == 6


def test_undelivered_rows_end_their_attempt() -> None:
    house = House()
    replica = house.attach(spec())
    replica.unreachable_routers = {7}
    cut = house.submit([1, 2, 3], router_id=7)
    fine = house.submit([1, 2, 3], router_id=8)
    house.step()
    assert cut.events[-2:] != []
    assert cut.request.attempt == 2
    replica.unreachable_routers = set()
    house.drain()
    house.check_outcomes()
    assert fine.request.attempt == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"incarnation": 5}, "incarnation 5"),
        ({"step": 2}, "step 2"),
        ({"num_sampled": [1]}, "rows"),
        ({"token_ids": [1, 2, 3]}, "adds up"),
        ({"num_sampled": [0, 0], "token_ids": []}, "row 0 sampled 0"),
        ({"num_sampled": [1, 1], "token_ids": [1, 2]}, "row 1 sampled 1"),
        ({"finishes": {2: FinishReason.LENGTH}}, "row 2"),
        ({"undelivered_rows": [-1]}, "row -1"),
        ({"finishes": {}}, "last token"),
    ],
)
def test_a_result_that_answers_no_plan_is_an_error_and_changes_nothing(change: dict[str, object], message: str) -> None:
    house = House()
    house.attach(spec(max_step_tokens=8))
    house.submit([1, 2], max_tokens=1)
    house.submit(range(20), max_tokens=9)
    house.make_plan()  # row 0 samples its last token, row 1 is an inner chunk
    house.run()
    right = house.results[1].popleft()
    house.results[1].append(replace(right, **change))  # type: ignore[arg-type]
    with pytest.raises(ResultMismatch, match=message):
        house.complete()
    house.results[1].append(right)
    house.drain()
    house.check_outcomes()


def test_an_answer_comes_once() -> None:
    house = House()
    house.attach(spec())
    house.submit([1, 2], max_tokens=5)
    house.make_plan()
    house.run()
    house.results[1].append(house.results[1][0])
    house.complete()
    with pytest.raises(ResultMismatch, match="0 unanswered"):
        house.complete()


def test_replica_ids_are_used_once_at_a_time() -> None:
    house = House()
    house.attach(spec())
    with pytest.raises(IllegalTransition, match="in use"):
        house.attach(spec())
    for call in (house.scheduler.plan, house.scheduler.detach):
        with pytest.raises(IllegalTransition, match="not attached"):
            call(9, 0)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("move", Move)
def test_moves_that_the_table_lacks_raise_and_change_nothing(state: State, move: Move) -> None:
    sequence = Sequence(Request(1, "model", (1,), 1), now=0, ticket=0)
    sequence.state = state
    if (state, move) in TRANSITIONS:
        sequence.move(move)
        assert sequence.state is TRANSITIONS[state, move]
    else:
        with pytest.raises(IllegalTransition, match=state.value):
            sequence.move(move)
        assert sequence.state is state
