"""Rates at their edges, under a clock that the test turns."""

from __future__ import annotations

import pytest

from router.access.key_file import TenantLimits
from router.access.rates import RateLimiter
from router.errors import Exhausted


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class House:
    """A limiter with its clock and limits in the test's hands."""

    def __init__(self, limits: TenantLimits) -> None:
        self.clock = Clock()
        self.limits = limits
        self.rates = RateLimiter(lambda tenant: self.limits, self.clock)

    def admitted(self, tenant: str = "t") -> bool:
        try:
            self.rates.admit(tenant)
        except Exhausted:
            return False
        return True


def test_a_minutes_worth_goes_at_once_and_comes_back_evenly() -> None:
    house = House(TenantLimits(requests_per_minute=6))
    assert [house.admitted() for _ in range(7)] == [True] * 6 + [False]
    with pytest.raises(Exhausted, match="6 requests a minute") as refused:
        house.rates.admit("t")
    assert refused.value.retry_after_s == pytest.approx(10)
    house.clock.now_s += 9.999
    assert not house.admitted()
    house.clock.now_s += 0.0011
    assert house.admitted()
    assert not house.admitted()
    assert house.admitted("another tenant")


def test_a_long_silence_is_worth_one_minute() -> None:
    house = House(TenantLimits(requests_per_minute=2))
    assert house.admitted()
    assert house.admitted()
    house.clock.now_s += 1e9
    assert [house.admitted() for _ in range(3)] == [True, True, False]


def test_a_clock_that_steps_back_gives_nothing() -> None:
    house = House(TenantLimits(requests_per_minute=1))
    assert house.admitted()
    house.clock.now_s -= 1000
    assert not house.admitted()


def test_a_prompt_waits_until_its_tokens_are_there() -> None:
    house = House(TenantLimits(tokens_per_minute=60))
    house.rates.charge_prompt("t", 50)
    with pytest.raises(Exhausted, match=r"60 tokens a minute.*, and 20 more are over it") as refused:
        house.rates.charge_prompt("t", 20)
    assert refused.value.retry_after_s == pytest.approx(10)
    house.clock.now_s += 10
    house.rates.charge_prompt("t", 20)


def test_a_prompt_over_the_whole_rate_needs_a_full_bucket_and_leaves_a_debt() -> None:
    house = House(TenantLimits(tokens_per_minute=60))
    house.rates.charge_prompt("t", 1)
    with pytest.raises(Exhausted) as refused:
        house.rates.charge_prompt("t", 600)
    assert refused.value.retry_after_s == pytest.approx(1)
    house.clock.now_s += 1
    house.rates.charge_prompt("t", 600)
    assert not house.admitted()
    house.clock.now_s += 540
    assert not house.admitted()
    house.clock.now_s += 1.001
    assert house.admitted()


def test_output_is_taken_when_it_comes() -> None:
    house = House(TenantLimits(tokens_per_minute=60))
    assert house.rates.counts_tokens("t")
    house.rates.charge_output("t", 90)
    with pytest.raises(Exhausted) as refused:
        house.rates.admit("t")
    assert refused.value.retry_after_s == pytest.approx(31)


def test_a_refused_request_counts_for_nothing() -> None:
    house = House(TenantLimits(requests_per_minute=10, tokens_per_minute=60))
    house.rates.charge_output("t", 90)
    for _ in range(20):
        assert not house.admitted()
    house.clock.now_s += 32
    assert house.admitted()


def test_as_many_run_as_may() -> None:
    house = House(TenantLimits(max_concurrent_requests=2))
    with house.rates.running("t"):
        with house.rates.running("t"):
            with pytest.raises(Exhausted, match="2 requests of this tenant run"), house.rates.running("t"):
                pass
            assert not house.admitted()
            with house.rates.running("u"):
                pass
        assert house.admitted()


def test_changed_limits_hold_from_the_next_request_and_forgive_nothing() -> None:
    house = House(TenantLimits(requests_per_minute=4))
    assert [house.admitted() for _ in range(5)] == [True] * 4 + [False]
    house.limits = TenantLimits(requests_per_minute=6)
    assert [house.admitted() for _ in range(3)] == [True, True, False]
    house.limits = TenantLimits()
    assert all(house.admitted() for _ in range(100))
    assert not house.rates.counts_tokens("t")


def test_a_tenants_own_limits_stand_over_the_common_ones() -> None:
    own = TenantLimits(tokens_per_minute=5)
    assert own.over(TenantLimits(requests_per_minute=1, tokens_per_minute=2)) == TenantLimits(1, 5)
