"""The cost model: its arithmetic, and what may be said of it on a command line."""

from __future__ import annotations

import pytest

from octavo.cost_model import CostModel, parse_costs
from octavo.options import OptionError
from worker_svc.config import WorkerConfig


def test_a_steps_time_is_the_sum_of_its_parts() -> None:
    costs = CostModel(1000, step_ms=2, row_us=3, kv_token_ns=4, copy_us=5)
    assert costs.step_ns(0, 0, 0) == 2_000_000
    assert costs.step_ns(500, 0, 0) == 502_000_000
    assert costs.step_ns(0, 10, 1000) == 2_000_000 + 30_000 + 4_000
    assert costs.step_ns(0, 0, 0, num_copies=2) == 2_000_000 + 10_000
    assert costs.copy_ns(2) == 10_000
    assert CostModel(kv_bytes=1024).num_blocks(2**20, 16) == 64


def test_costs_are_read_by_name() -> None:
    assert parse_costs("") == CostModel()
    assert parse_costs(" step_ms=3, row_us = 7.5 ") == CostModel(step_ms=3, row_us=7.5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("speed=3", "'speed' is none of prefill_tokens_per_s, step_ms"),
        ("step_ms", "step_ms is ''; it must be a number"),
        ("step_ms=x", "step_ms is 'x'"),
        ("step_ms=-1", "step_ms is -1; it must be a finite number, at least 0"),
        ("prefill_tokens_per_s=0", "above 0"),
        ("kv_bytes=inf", "above 0"),
        ("step_ms=nan", "at least 0"),
    ],
)
def test_bad_costs_are_named(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_costs(text)
    with pytest.raises(OptionError, match="--simulated-costs"):
        WorkerConfig(simulated_costs=text)
