"""A pool too small for all: room for growth, and caps on prompts."""

from __future__ import annotations

from random import Random

import pytest

from scheduler_svc.core.foresight import Foresight
from scheduler_svc.core.growth import Growth
from scheduler_svc.core.lengths import Lengths
from scheduler_svc.core.plan import Limit
from scheduler_svc.core.rates import StepRates, prefill_cap
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.types import CoreLimits, FinishReason, Request
from tests.core.house import House, spec


def peak_by_steps(lengths: list[tuple[int, int]], block_size: int) -> int:
    """The obvious twin: lets all grow step by step."""
    growths = [(tokens, max(0, rest - 1)) for tokens, rest in lengths]  # the last token needs no place
    peak = 0
    for step in range(max(growth for _, growth in growths) + 1):
        peak = max(peak, sum(-(-(tokens + step) // block_size) for tokens, growth in growths if growth >= step))
    return peak


@pytest.mark.parametrize("seed", range(20))
def test_the_foreseen_peak_is_that_of_growing_step_by_step(seed: int) -> None:
    random = Random(seed)
    lengths = [(random.randint(1, 60), random.randint(0, 40)) for _ in range(random.randint(1, 12))]
    exact = Foresight(lengths[1:], 1).peak_blocks(*lengths[0])
    assert exact == peak_by_steps(lengths, 1)
    # With blocks of several tokens the peak of blocks may be at another end than that of tokens.
    coarse = Foresight(lengths[1:], 8).peak_blocks(*lengths[0])
    assert abs(coarse - peak_by_steps(lengths, 8)) <= len(lengths)


def test_what_ended_tells_how_long_the_next_ones_get() -> None:
    growth = Growth(4, 64)
    sequence = Sequence(Request(1, "model", [1] * 10, 500), now=0, ticket=0)
    assert growth.num_remaining_tokens(sequence, end=510) == 64  # nothing is known but what is expected
    growth.note_end(20, FinishReason.END_TOKEN)
    assert growth.num_remaining_tokens(sequence, end=510) == 20
    assert growth.num_remaining_tokens(sequence, end=15) == 5
    sequence.token_ids.extend([1] * 30)
    assert growth.num_remaining_tokens(sequence, end=510) == 64  # longer than any that was seen
    growth.note_preemption()
    assert growth.num_remaining_tokens(Sequence(sequence.request, 0, 1), end=510) == 22  # a tenth more caution


def test_what_a_limit_cut_short_would_have_gone_on() -> None:
    growth = Growth(4, 64)
    for _ in range(50):
        growth.note_end(2, FinishReason.LENGTH)
    sequence = Sequence(Request(1, "model", [1] * 10, 500), now=0, ticket=0)
    assert growth.num_remaining_tokens(sequence, end=40) == 30
    assert growth.num_remaining_tokens(sequence, end=510) == 2 + 64


def mean_by_hand(ends: list[tuple[int, bool]], now: int, most: int, num_beyond: int) -> float:
    """The obvious twin: walks token by token, with the share that goes on past each."""
    longest = max(length for length, _ in ends)
    if now >= longest:
        return min(most, num_beyond)
    share, mean = 1.0, 0.0
    for length in range(now, min(now + most, longest + num_beyond)):
        at_risk = sum(1 for other, _ in ends if other >= length)
        if length > now and at_risk:
            share *= 1 - sum(1 for other, was_cut in ends if other == length and not was_cut) / at_risk
        mean += share
    return mean


@pytest.mark.parametrize("seed", range(20))
def test_the_mean_of_what_is_left_is_that_of_going_token_by_token(seed: int) -> None:
    random = Random(seed)
    num_beyond = random.choice([0, 5, 40])
    ends = [(random.randint(0, 30), random.random() < 0.4) for _ in range(random.randint(1, 7))]
    lengths = Lengths(num_beyond)
    for num_tokens, was_cut in ends:
        lengths.note(num_tokens, was_cut=was_cut)
    for now in range(40):
        for most in (1, 4, 33, 200):
            found = lengths.num_more(now, most)
            assert found <= lengths.longest_mean + 1e-9
            survives = any(length > now for length, _ in ends)
            assert found == pytest.approx(mean_by_hand(ends, now, most, num_beyond)) or not survives


def test_what_is_remembered_of_lengths_is_what_ended_lately() -> None:
    lengths = Lengths(64)
    for num_tokens in [500] * 200 + [10] * 200:
        lengths.note(num_tokens, was_cut=False)
    assert lengths.num_more(0, 1000) == 10


def limits_of_twenty(house: House) -> list[Limit]:
    """What stopped each step while twenty sequences ran to their ends in room for five."""
    house.attach(spec(num_device_blocks=40, num_slots=20, max_step_tokens=64))  # 160 tokens: for five of 32
    for n in range(20):
        house.submit([n, n + 1, *range(14)], max_tokens=16)
    limits = [house.step().limited_by for _ in range(200)]
    assert not house.scheduler.sequences
    house.check_outcomes(num_cache_tokens=160)
    return limits


def test_room_is_kept_before_anything_had_to_be_preempted() -> None:
    house = House(CoreLimits())
    limits = limits_of_twenty(house)
    assert Limit.GROWTH in limits
    assert house.scheduler.statistics().replicas[0].num_preemptions == 0


def test_room_kept_for_worse_ones_holds_nobody_back() -> None:
    house = House(CoreLimits())
    house.attach(spec(num_device_blocks=10, num_slots=4))
    worse = house.submit(range(8), max_tokens=30, priority=1)
    house.step()
    better = house.submit(range(20, 28), max_tokens=30)
    house.step()
    assert better.is_running
    while better.is_live:
        house.step()
    assert worse.is_live
    house.drain()
    house.check_outcomes(num_cache_tokens=40)


def test_once_preemptions_start_admission_keeps_more_room() -> None:
    house = House(CoreLimits(expected_output_tokens=4))
    limits = limits_of_twenty(house)
    statistics = house.scheduler.statistics().replicas[0]
    assert Limit.GROWTH in limits
    assert statistics.num_preemptions <= 5  # of the ten that entered at first; nobody after them


def test_room_is_kept_no_longer_than_sequences_run() -> None:
    house = House()
    house.attach(spec(num_device_blocks=4))
    for n in (1, 8):
        house.submit(range(n, n + 7), max_tokens=9)
    for _ in range(4):
        house.step()
    assert house.scheduler.statistics().replicas[0].has_kept_room
    (line,) = house.tick()
    assert "replica-1" in line
    assert "--num-kv-blocks" in line
    assert house.tick() == ()  # said once
    house.drain()
    assert not house.scheduler.statistics().replicas[0].has_kept_room


def test_prompts_take_a_capped_part_of_a_step_while_sequences_decode() -> None:
    house = House(CoreLimits(max_prefill_tokens=6))
    house.attach(spec(max_step_tokens=40, num_device_blocks=60))
    house.submit([1, 2, 3], max_tokens=30)
    assert list(house.make_plan().row_counts) == [3]
    house.submit(range(20), max_tokens=2)
    planned = house.plan()
    assert planned.plan is not None
    assert (list(planned.plan.row_counts), planned.limited_by) == ([1, 6], Limit.PREFILL_CAP)
    house.run()
    house.complete()
    assert list(house.make_plan().row_counts) == [1, 6]  # also where the prompt runs already
    house.run()
    house.complete()
    house.drain()
    house.check_outcomes()


def test_the_smaller_of_two_caps_holds() -> None:
    house = House(CoreLimits(max_prefill_tokens=6, target_inter_token_ns=30_000))
    house.attach(spec(max_step_tokens=40, num_device_blocks=60))
    replica = house.scheduler.replicas[1]
    for num_tokens in (1, 20):
        replica.rates.note(1, num_tokens, 2000 + 1000 * num_tokens)
    assert replica.max_prefill_tokens == 6  # not the 28 of the target
    for _ in range(50):
        for num_tokens in (1, 20):
            replica.rates.note(1, num_tokens, 5000 + 5000 * num_tokens)
    assert replica.max_prefill_tokens == 5  # nor the 6


def test_alone_a_prompt_takes_the_whole_step() -> None:
    house = House(CoreLimits(max_prefill_tokens=6))
    house.attach(spec(max_step_tokens=40))
    house.submit(range(20), max_tokens=2)
    assert list(house.make_plan().row_counts) == [20]


def rates_of(step_ns: int, token_ns: int) -> StepRates:
    rates = StepRates()
    for num_rows, num_tokens in [(8, 8), (9, 200), (10, 10), (4, 150)]:
        rates.note(num_rows, num_tokens, step_ns + token_ns * num_tokens)
    return rates


def test_rates_are_found_in_the_steps() -> None:
    rates = rates_of(7_000_000, 300_000)
    assert rates.token_ns == pytest.approx(300_000)
    assert rates.step_ns == pytest.approx(7_000_000)
    for _ in range(5000):
        rates.note(8, 8, 7_000_000 + 300_000 * 8)  # a long time without a prompt
    assert rates.token_ns == pytest.approx(300_000)
    assert StepRates().step_ns is None


def test_the_cap_follows_the_target_and_else_the_fixed_cost() -> None:
    rates = rates_of(7_000_000, 300_000)
    assert prefill_cap(rates, 10, target_ns=40_000_000) == 100  # 33 ms are 110 tokens, of which 10 decode
    assert prefill_cap(rates, 10, target_ns=None) == int(8 * 7 / 0.3)
    assert prefill_cap(StepRates(), 10, target_ns=40_000_000) is None


def test_a_target_that_cannot_be_met_still_lets_prompts_go_on() -> None:
    house = House(CoreLimits(target_inter_token_ns=1))
    replica = house.attach(spec(max_step_tokens=40, num_device_blocks=60))
    replica.token_ns = 1000
    house.submit([1, 2, 3], max_tokens=60)
    for _ in range(5):
        house.step()
    prompt = house.submit(range(20), max_tokens=1)
    assert house.make_plan().row_counts == [1, 4]  # a block
    house.run()
    house.complete()
    for _ in range(5):
        house.step()
    assert prompt.outcome is not None
