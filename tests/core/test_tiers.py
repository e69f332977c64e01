"""The host tier: what is demoted, what is found there, and which way a preempted sequence goes."""

from __future__ import annotations

import pytest

from scheduler_svc.core.host_tier import HostTier
from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.statistics import ReplicaStatistics
from scheduler_svc.core.types import CoreLimits, FinishReason, Preempted, Scheduled
from tests.core.house import House, Stream, spec


def house_of(mode: PreemptionMode = PreemptionMode.AUTO, num_host_blocks: int = 32, **changes: int) -> House:
    house = House(CoreLimits(preemption_mode=mode, expected_output_tokens=0))
    house.attach(spec(num_host_blocks=num_host_blocks, **changes))
    return house


def run_one(house: House, prompt: list[int], **fields: object) -> Stream:
    stream = house.submit(prompt, max_tokens=1, **fields)
    house.drain()
    house.check_outcomes()
    return stream


def load(house: House) -> ReplicaStatistics:
    return house.scheduler.statistics().replicas[0]


def first_start(stream: Stream) -> Scheduled:
    return next(event for event in stream.events if isinstance(event, Scheduled))


def test_evicted_blocks_are_found_in_the_host_tier_and_copied_back() -> None:
    house = house_of()
    run_one(house, list(range(28)))  # 7 blocks of 16
    run_one(house, list(range(100, 160)))  # 15 blocks: evicts six of the seven
    assert load(house).num_demoted_blocks == 6
    again = run_one(house, list(range(28)))
    assert first_start(again).cached_tokens == 24  # the first block is on the device still
    assert load(house).num_promoted_blocks == 5
    assert load(house).num_host_cached_tokens == 20


def test_a_prefix_may_lie_on_both_tiers() -> None:
    house = house_of()
    run_one(house, list(range(28)))
    run_one(house, list(range(100, 140)))  # 10 blocks: takes the nine others and the first prompt's last
    assert load(house).num_demoted_blocks == 1
    again = run_one(house, [*range(28), 90])
    assert (first_start(again).cached_tokens, load(house).num_host_cached_tokens) == (28, 4)


def test_what_the_host_holds_already_is_not_copied_again() -> None:
    house = house_of()
    for _ in range(4):
        run_one(house, list(range(28)))
        run_one(house, list(range(100, 160)))
    assert load(house).num_demoted_blocks <= 7 + 15  # each block once


def test_the_host_forgets_the_longest_unused() -> None:
    house = house_of(num_host_blocks=4)
    run_one(house, list(range(28)))
    run_one(house, list(range(100, 160)))
    assert load(house).num_cached_host_blocks == 4
    again = run_one(house, list(range(28)))  # blocks are evicted from its end, so its beginning came last
    assert first_start(again).cached_tokens == 4 + 16


def test_what_is_evicted_again_was_used_again() -> None:
    tier = HostTier(2)
    for digest, block in ((b"old", 1), (b"other", 2), (b"old", 3), (b"new", 4)):
        tier.demote(digest, block)
    assert tier.find(b"old") is not None
    assert tier.find(b"other") is None


def test_what_is_forgotten_before_its_plan_is_not_copied() -> None:
    tier = HostTier(2)
    tier.demote(b"wrong", 1)
    tier.forget(b"wrong")
    assert tier.take_copies().num_blocks == 0


def test_copies_of_one_plan_may_cross() -> None:
    """A promotion's source is not overwritten by a demotion of the same plan, though the host has room for both only
    just."""
    house = house_of(num_host_blocks=6, num_device_blocks=8)
    for _ in range(6):
        for start in (0, 100, 200):
            run_one(house, list(range(start, start + 26)))
    assert load(house).num_promoted_blocks > 0


def test_resetting_the_cache_empties_both_tiers() -> None:
    house = house_of()
    run_one(house, list(range(28)))
    run_one(house, list(range(100, 160)))
    num_findable = load(house).num_cached_blocks + load(house).num_cached_host_blocks
    assert house.scheduler.reset_prefix_cache() == num_findable
    assert first_start(run_one(house, list(range(28)))).cached_tokens == 0


def test_a_numeric_error_leaves_nothing_in_either_tier() -> None:
    house = house_of(num_device_blocks=8)
    stream = house.submit(range(20), max_tokens=4)
    house.step()  # four blocks are findable
    house.submit(range(60, 76), max_tokens=1, priority=-1)
    house.step()
    assert not stream.is_running
    house.step()
    house.replicas[1].numeric_errors.add(stream.request.stream_key)
    house.drain()
    assert stream.finish is FinishReason.NUMERIC_ERROR
    assert first_start(run_one(house, list(range(20)))).cached_tokens == 0


def pressed(mode: PreemptionMode, copy_ns: int = 0, token_ns: int = 0) -> House:
    house = house_of(mode, num_host_blocks=64, num_device_blocks=14, num_slots=8)
    house.replicas[1].copy_ns, house.replicas[1].token_ns = copy_ns, token_ns
    for n in range(8):
        house.submit([n, n + 1, n + 2, n + 3, n + 4], max_tokens=40)
    house.drain()
    house.check_outcomes(num_cache_tokens=56)
    return house


def test_swap_brings_back_what_recompute_computes_again() -> None:
    swapped, recomputed = pressed(PreemptionMode.SWAP), pressed(PreemptionMode.RECOMPUTE)
    assert set(load(swapped).num_preemptions_by_kind) == {"swap"}
    assert set(load(recomputed).num_preemptions_by_kind) == {"recompute"}
    assert load(swapped).num_promoted_blocks > 0
    # What is left to compute again is the block that was not full, and tokens in flight.
    assert load(swapped).num_recomputed_tokens <= 6 * load(swapped).num_preemptions
    assert load(swapped).num_recomputed_tokens < load(recomputed).num_recomputed_tokens / 2


@pytest.mark.parametrize(("copy_ns", "token_ns", "kind"), [(10, 1000, "swap"), (1_000_000, 10, "recompute")])
def test_auto_takes_what_measured_cheaper(copy_ns: int, token_ns: int, kind: str) -> None:
    house = pressed(PreemptionMode.AUTO, copy_ns, token_ns)
    by_kind = load(house).num_preemptions_by_kind
    assert by_kind[kind] > 0.5 * load(house).num_preemptions, by_kind
    assert load(house).copy_ns == pytest.approx(copy_ns)


def test_without_host_blocks_every_preemption_recomputes() -> None:
    house = house_of(PreemptionMode.AUTO, num_host_blocks=0, num_device_blocks=4)
    for n in (1, 8):
        house.submit(range(n, n + 7), max_tokens=9)
    house.drain()
    house.check_outcomes(num_cache_tokens=16)
    events = [e for stream in house.streams.values() for e in stream.events if isinstance(e, Preempted)]
    assert {event.mode for event in events} == {PreemptionMode.RECOMPUTE}


def test_swap_without_prefix_caching_is_refused() -> None:
    with pytest.raises(ValueError, match="preemption_mode is swap"):
        CoreLimits(preemption_mode=PreemptionMode.SWAP, enable_prefix_caching=False)


def test_cached_blocks_are_not_copied_where_computing_them_is_quicker() -> None:
    house = house_of(num_device_blocks=8)
    house.replicas[1].copy_ns, house.replicas[1].token_ns = 1_000_000, 10
    for start in range(0, 4000, 100):
        house.submit([start % 47, *range(start, start + 26)], max_tokens=3)
        house.drain()
    assert load(house).num_demoted_blocks < 30  # of some 230 that were evicted


def test_copies_are_tried_again_now_and_then() -> None:
    house = house_of(num_device_blocks=8, num_host_blocks=2000)
    replica = house.replicas[1]
    replica.copy_ns, replica.token_ns = 1_000_000, 100_000
    for n in range(3):
        run_one(house, [n] * 27)
    house.scheduler.replicas[1].kv.copies_pay = False  # as one slow copy may make it seem
    replica.copy_ns = 10
    before = load(house).num_demoted_blocks
    for n in range(1500):
        house.checks_laws = n % 100 == 0
        run_one(house, [n % 46, n % 45, n % 44, n % 43] * 6)
        if house.scheduler.replicas[1].kv.copies_pay:
            break
    assert load(house).num_demoted_blocks > before
    assert house.scheduler.replicas[1].kv.copies_pay
