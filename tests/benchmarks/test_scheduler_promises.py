"""What the scheduler promises of throughput, fairness and schedules, at the size at which it is benchmarked."""

from __future__ import annotations

from typing import Any

from benchmarks.scheduler_promises import fairness, kv_pressure, preemption_modes, unfilled_budget


def test_twice_the_clients_that_the_pool_holds_lose_nothing() -> None:
    found: dict[str, Any] = kv_pressure()
    assert found["ratio"] >= 0.95
    assert found["twenty, KV for ten"]["recomputed_tokens"] == 0


def test_auto_is_as_good_as_the_better_way_to_preempt() -> None:
    found: dict[str, Any] = preemption_modes()
    assert found["cheap copies"]["auto : best"] >= 0.95
    assert found["cheap copies"]["swap"] > found["cheap copies"]["recompute"]
    assert found["dear copies"]["auto : best"] >= 0.95
    assert found["dear copies"]["recompute"] > found["dear copies"]["swap"]


def test_tenants_of_equal_weight_are_served_alike() -> None:
    found: dict[str, Any] = fairness()
    assert 0.9 <= found["few : many"] <= 1.1


def test_a_budget_that_nobody_fills_decides_nothing() -> None:
    found: dict[str, Any] = unfilled_budget()
    assert found["identical"]
    assert found["num_plans"] > 100
