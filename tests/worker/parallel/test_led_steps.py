"""Rank 0's steps on the other ranks, where devices run ahead: all ranks run the same rows, whoever is done first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.internal.v1 import ranks_pb2, worker_pb2
from tests.fakes.eager_device import EagerDevice
from tests.worker.harness import sampling
from tests.worker.test_runner_plans import admission, plan
from tests.worker.test_running_ahead import ahead_runner
from worker_svc.follower import FollowedSteps
from worker_svc.parallel.replica import LeadingRunner
from worker_svc.runner import Runner


class _Sender:
    """Hands orders to the other rank as they are sent."""

    def __init__(self, take: Callable[[ranks_pb2.RankOrder], None]) -> None:
        self.send = take


class Ranks:
    """Two runners of one model, the second following; neither computes a part."""

    def __init__(self, directory: Path) -> None:
        self.first, self.second = (ahead_runner(directory, EagerDevice()) for _ in range(2))
        self.steps = FollowedSteps(self.second)
        self.leading = LeadingRunner(self.first, _Sender(self._take))  # type: ignore[arg-type]

    def _take(self, order: ranks_pb2.RankOrder) -> None:
        if order.WhichOneof("order") == "reset":
            self.steps.reset()
        else:
            self.steps.run(order)

    def computed(self) -> list[list[int]]:
        """Tokens computed by each rank, by slot."""
        return [runner._rows.num_computed_tokens.tolist() for runner in (self.first, self.second)]


@pytest.fixture
def ranks(tiny_directory: Path) -> Ranks:
    return Ranks(tiny_directory)


def ending_at_once(runner: Runner) -> worker_pb2.StepPlan:
    """A first step whose row ends with the token that it samples, and another row that goes on."""
    token_ids = runner.run(plan(1, [(0, 0, 3)], admissions=[admission()])).sampled[0].token_ids.tolist()
    ends = admission(sampling=sampling(max_tokens=9, end_token_ids=token_ids))
    return plan(1, [(0, 0, 3), (1, 0, 3)], admissions=[ends, admission(slot=1, token_ids=[4, 9, 60])])


@pytest.mark.parametrize("is_settled", [False, True])
def test_all_ranks_know_of_the_same_rows_that_they_have_ended(ranks: Ranks, is_settled: bool) -> None:
    first = ending_at_once(ranks.second)
    ranks.leading.reset()
    flight = ranks.leading.launch(first)
    if is_settled:  # before a plan comes that was made without its result
        flight.result()
    ranks.leading.launch(plan(2, [(0, 3, 1), (1, 3, 1)]))
    leading, following = ranks.computed()
    assert leading[:2] == following[:2] == [3 if is_settled else 4, 4]


def test_a_reset_forgets_what_was_settled(ranks: Ranks) -> None:
    first = ending_at_once(ranks.second)
    for _ in range(2):
        ranks.leading.reset()
        for flight in [ranks.leading.launch(first), ranks.leading.launch(plan(2, [(0, 3, 1), (1, 3, 1)]))]:
            flight.result()
        assert len(ranks.steps._flights) == 2
        ranks.leading.launch(plan(3, [(1, 4, 1)]))
        assert len(ranks.steps._flights) == 1
        leading, following = ranks.computed()
        assert leading[:2] == following[:2] == [4, 5]
