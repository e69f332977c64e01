"""Whole systems, one a seed: whatever goes wrong, each request ends once, with the tokens that it has alone.

`python -m tests.simulation SEED` tells the story of a seed that failed here.
"""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler_svc.core.limits import PreemptionMode
from tests.simulation.scenario import Misfortune, draw
from tests.simulation.world import Outcome, run_seed

FEW, MANY = 60, 1060

outcome_of = functools.cache(run_seed)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of warnings about what the simulation broke on purpose say nothing."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("seed", range(FEW))
def test_whatever_goes_wrong_each_request_ends_once_with_its_own_tokens(seed: int) -> None:
    outcome = outcome_of(seed)
    assert sum(outcome.ends.values()) == len(draw(seed).requests)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FEW, MANY))
def test_whatever_goes_wrong_also_in_rarer_worlds(seed: int) -> None:
    outcome = run_seed(seed)
    assert sum(outcome.ends.values()) == len(draw(seed).requests)


def test_the_few_seeds_see_every_misfortune_and_most_requests_survive_it() -> None:
    outcomes = [outcome_of(seed) for seed in range(FEW)]
    scenarios = [draw(seed) for seed in range(FEW)]
    ends = sum((outcome.ends for outcome in outcomes), Counter[str]())
    undisturbed = ends["completed"] + ends["internal"] + ends["unavailable"]
    assert ends["completed"] > 0.9 * undisturbed, ends
    assert {"completed", "the client went away", "its router died", "invalid_argument", "exhausted"} <= set(ends)
    assert {kind for scenario in scenarios for kind in scenario.misfortunes} == set(Misfortune)
    assert any(wanted.is_poison for scenario in scenarios for wanted in scenario.requests)
    assert any(wanted.fails_numerically for scenario in scenarios for wanted in scenario.requests)
    assert sum(outcome.num_preemptions for outcome in outcomes) > 40
    assert sum(outcome.num_replayed_states for outcome in outcomes) > 2
    assert sum(outcome.num_promoted_blocks for outcome in outcomes) > 40
    tiers = {(scenario.spec.num_host_blocks > 0, scenario.limits.preemption_mode) for scenario in scenarios}
    assert {(True, mode) for mode in PreemptionMode} <= tiers
    assert sum(outcome.num_attempts for outcome in outcomes) > ends["completed"] + 100
    assert sum(outcome.num_scheduler_starts for outcome in outcomes) > FEW + 10


def _outcome_in_another_process(seed: int) -> str:
    code = f"from tests.simulation.world import run_seed; print(run_seed({seed}).digest)"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _busiest_seed() -> int:
    """A seed with a restart of the scheduler, deaths and losses."""
    wanted = {Misfortune.SCHEDULER_DIES, Misfortune.WORKER_DIES}
    return next(seed for seed in range(FEW) if wanted <= set(draw(seed).misfortunes))


def test_a_seed_is_one_history_in_every_process() -> None:
    seed = _busiest_seed()
    first: Outcome = outcome_of(seed)
    assert run_seed(seed) == first
    assert _outcome_in_another_process(seed) == first.digest
