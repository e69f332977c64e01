"""Plans on the runner: preemption, rows that ended, pipelined plans, block copies, and plans that disagree."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo.internal.v1 import types_pb2, worker_pb2
from tests.worker.harness import Driver, sampling
from worker_svc.messages import step_result
from worker_svc.rows import PlanError
from worker_svc.runner import Runner


def admission(slot: int = 0, **changes: object) -> worker_pb2.Admission:
    values: dict[str, object] = {
        "slot": slot,
        "token_ids": [5, 6, 7],
        "num_prompt_tokens": 3,
        "block_ids": [slot * 4, slot * 4 + 1],
        "sampling": sampling(max_tokens=4),
        **changes,
    }
    return worker_pb2.Admission(**values)  # type: ignore[arg-type]


def plan(step: int, rows: list[tuple[int, int, int]], **changes: object) -> worker_pb2.StepPlan:
    """Rows are (slot, start, count)."""
    slots, starts, counts = zip(*rows, strict=True) if rows else ((), (), ())
    return worker_pb2.StepPlan(step=step, row_slots=slots, row_starts=starts, row_counts=counts, **changes)  # type: ignore[arg-type]


@pytest.fixture
def runner(tiny_runner: Runner) -> Runner:
    tiny_runner.reset()
    return tiny_runner


def test_preemption_and_resumption_change_nothing(driver: Driver) -> None:
    params = sampling(temperature=0.8, seed=11, max_tokens=20, presence_penalty=0.5)
    expected = driver.add(list(range(30, 55)), params)
    driver.finish(expected)
    sequence, company = driver.add(list(range(30, 55)), params), driver.add([4] * 9, sampling(max_tokens=40))
    for interruption in (2, 5, 3):
        for _ in range(interruption):
            driver.step({s.key: min(10, len(s.tokens) - s.num_computed) for s in (company, sequence)})
        driver.preempt(sequence)
    driver.finish(sequence, chunk=6)
    assert sequence.output == expected.output


def test_a_cached_prefix_changes_nothing(runner: Runner) -> None:
    token_ids = list(range(40, 50))
    whole = admission(token_ids=token_ids, num_prompt_tokens=10, block_ids=[0, 1, 2])
    first = runner.run(plan(1, [(0, 0, 10)], admissions=[whole]))
    # A second sequence takes over the first one's two full blocks.
    sharing = admission(slot=1, token_ids=token_ids, num_prompt_tokens=10, num_computed_tokens=8, block_ids=[0, 1, 9])
    second = runner.run(plan(2, [(1, 8, 2)], admissions=[sharing]))
    assert first.sampled[0].token_ids.tolist() == second.sampled[0].token_ids.tolist()


def test_released_slots_are_free_within_the_same_plan(runner: Runner) -> None:
    runner.run(plan(1, [(0, 0, 3)], admissions=[admission()]))
    outcome = runner.run(plan(2, [(0, 0, 3)], released_slots=[0], admissions=[admission(token_ids=[8, 9, 10])]))
    assert outcome.sampled[0].output_positions.tolist() == [0]


def test_a_row_that_ended_stays_dead_until_released(runner: Runner) -> None:
    """At depth two the next plan is made before the scheduler knows of the end."""
    one = admission(sampling=sampling(max_tokens=1))
    other = admission(slot=1)
    runner.run(plan(1, [(0, 0, 3), (1, 0, 3)], admissions=[one, other]))
    appended = {"append_slots": [0], "append_counts": [1], "append_block_ids": [30]}
    outcome = runner.run(plan(2, [(0, 3, 1), (1, 3, 1)], **appended))
    result = step_result(outcome, 1, (), 0)
    assert list(result.num_sampled) == [0, 1]
    assert list(result.finish_reasons) == [0, 0]
    assert len(result.token_ids) == 1
    assert runner.run(plan(3, [(0, 4, 1)])).sampled == ()
    assert runner.run(plan(4, [(0, 0, 3)], released_slots=[0], admissions=[one])).sampled != ()


def test_an_inner_chunk_samples_nothing(runner: Runner) -> None:
    result = step_result(runner.run(plan(1, [(0, 0, 2)], admissions=[admission()])), 1, (), 0)
    assert (list(result.num_sampled), list(result.token_ids)) == ([0], [])


def test_the_order_of_rows_does_not_matter(runner: Runner) -> None:
    sequences = [
        admission(slot=slot, token_ids=[slot + 1] * (slot + 1), num_prompt_tokens=slot + 1) for slot in range(4)
    ]
    orders = ([0, 1, 2, 3], [3, 1, 0, 2])
    found = []
    for order in orders:
        runner.reset()
        outcome = runner.run(plan(1, [(slot, 0, slot + 1) for slot in order], admissions=sequences))
        result = step_result(outcome, 1, (), 0)
        found.append(dict(zip(order, result.token_ids, strict=True)))
    assert found[0] == found[1]


def test_blocks_survive_a_trip_to_the_host(runner: Runner) -> None:
    """Swapped out, overwritten by another sequence, swapped in elsewhere: the KV is the same."""
    token_ids = list(range(40, 50))
    whole = admission(token_ids=token_ids, num_prompt_tokens=10, block_ids=[0, 1, 2])
    first = runner.run(plan(1, [(0, 0, 10)], admissions=[whole]))
    intruder = admission(slot=1, token_ids=[3] * 8, num_prompt_tokens=8, block_ids=[0, 1])
    # The copy out precedes the compute that overwrites its source.
    runner.run(
        plan(
            2, [(1, 0, 8)], released_slots=[0], admissions=[intruder], demote_device_ids=[0, 1], demote_host_ids=[5, 6]
        )
    )
    resumed = admission(token_ids=token_ids, num_prompt_tokens=10, num_computed_tokens=8, block_ids=[20, 21, 22])
    third = runner.run(plan(3, [(0, 8, 2)], admissions=[resumed], promote_host_ids=[5, 6], promote_device_ids=[20, 21]))
    assert first.sampled[0].token_ids.tolist() == third.sampled[0].token_ids.tolist()


DISAGREEMENTS: dict[str, tuple[Callable[[], worker_pb2.StepPlan], str]] = {
    "wrong_step": (lambda: plan(7, []), "step 7, the worker expects 2"),
    "start": (lambda: plan(2, [(0, 2, 1)]), "slot 0: the plan starts at 2, the worker has computed 3"),
    "beyond_known": (lambda: plan(2, [(0, 3, 2)]), "slot 0: the plan runs up to 5, the row has 4 known tokens"),
    "no_tokens": (lambda: plan(2, [(0, 3, 0)]), "slot 0: the plan runs 0 tokens"),
    "no_blocks": (
        lambda: plan(2, [(1, 0, 5)], admissions=[admission(1, token_ids=[1] * 5, block_ids=[4])]),
        "slot 1: the plan runs up to 5, the row's blocks hold 4 tokens",
    ),
    "empty_slot": (lambda: plan(2, [(3, 0, 1)]), "slot 3: the plan runs it"),
    "twice": (lambda: plan(2, [(0, 3, 1), (0, 3, 1)]), "slot 0: the plan runs it twice"),
    "unknown_slot": (lambda: plan(2, [(99, 0, 1)]), "slot 99: the worker has 8 slots"),
    "occupied": (lambda: plan(2, [], admissions=[admission()]), "slot 0: the plan admits into it"),
    "release_empty": (lambda: plan(2, [], released_slots=[5]), "slot 5: the plan releases it"),
    "append_empty": (
        lambda: plan(2, [], append_slots=[5], append_counts=[1], append_block_ids=[1]),
        "slot 5: the plan appends",
    ),
    "append_counts": (lambda: plan(2, [], append_slots=[0], append_counts=[2], append_block_ids=[1]), "counts say 2"),
    "block_range": (
        lambda: plan(2, [], append_slots=[0], append_counts=[1], append_block_ids=[128]),
        "slot 0: block 128, the cache has 128",
    ),
    "token_range": (lambda: plan(2, [], admissions=[admission(1, token_ids=[2**32 - 1])]), "token id 4294967295"),
    "padding_token": (lambda: plan(2, [], admissions=[admission(1, token_ids=[257])]), "the vocabulary has 257"),
    "prompt_border": (lambda: plan(2, [], admissions=[admission(1, num_prompt_tokens=4)]), "4 prompt tokens of 3"),
    "half_block": (lambda: plan(2, [], admissions=[admission(1, num_computed_tokens=2)]), "2 computed tokens of 3"),
    "too_long": (lambda: plan(2, [], admissions=[admission(1, token_ids=[1] * 256)]), "256 tokens, expected 1 to 255"),
    "complete": (
        lambda: plan(2, [], admissions=[admission(1, num_prompt_tokens=1, sampling=sampling(max_tokens=2))]),
        "2 output tokens, max_tokens is 2",
    ),
    "bias_id": (
        lambda: plan(2, [], admissions=[admission(1, sampling=sampling(bias_token_ids=[257], bias_values=[1.0]))]),
        "id 257 in the logit bias",
    ),
    "stop_id": (
        lambda: plan(2, [], admissions=[admission(1, sampling=sampling(stop_token_ids=[9999]))]),
        "id 9999 in the stop ids",
    ),
    "adapter": (lambda: plan(2, [], admissions=[admission(1, adapter="other")]), "adapter 'other'"),
    "host_block": (lambda: plan(2, [], demote_device_ids=[0], demote_host_ids=[99]), "block copies"),
    "budget": (lambda: plan(2, [(0, 3, 513)]), "513 tokens, a step takes 512"),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_a_plan_that_disagrees_is_an_error(runner: Runner, name: str) -> None:
    build, message = DISAGREEMENTS[name]
    runner.run(plan(1, [(0, 0, 3)], admissions=[admission()]))
    with pytest.raises(PlanError) as caught:
        runner.run(build())
    assert message in str(caught.value)
    # The worker starts over, and is whole.
    runner.reset()
    outcome = runner.run(plan(1, [(0, 0, 3)], admissions=[admission()]))
    assert outcome.sampled[0].finish_reasons.tolist() == [types_pb2.FINISH_REASON_UNSPECIFIED]
