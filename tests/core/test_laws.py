"""The laws notice what they forbid: each is broken by hand, once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from scheduler_svc.core import laws
from scheduler_svc.core.blocks import BlockPool
from scheduler_svc.core.history import Decision
from scheduler_svc.core.host_tier import HostTier
from scheduler_svc.core.kv_space import KvSpace
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, State
from scheduler_svc.core.types import CoreLimits, ReplicaSpec
from tests.core.house import House, spec


def crowded() -> Scheduler:
    """One steady row with two full blocks, one filling row, one that follows it, one that waits, one plan in
    flight, one cached prefix, a host tier."""
    house = House()
    house.attach(spec(num_slots=3, max_step_tokens=8, num_host_blocks=4))
    house.submit([7] * 5, max_tokens=1)
    house.drain()
    house.submit(range(10), max_tokens=20)
    house.step()
    house.step()
    house.submit(range(30, 50), max_tokens=20)
    house.submit(range(30, 50), max_tokens=20)
    house.submit([1] * 40, max_tokens=20)
    house.make_plan()
    return house.scheduler


def kv(scheduler: Scheduler) -> KvSpace:
    return scheduler.replicas[1].kv


def steady(scheduler: Scheduler) -> Sequence:
    return scheduler.replicas[1].rows.steady.sequences[0]


def waiting(scheduler: Scheduler) -> Sequence:
    return scheduler.room.queue("model")[0]


def filling(scheduler: Scheduler) -> Sequence:
    return scheduler.replicas[1].rows.filling[0]


def suspect(sequence: Sequence, scheduler: Scheduler) -> None:
    sequence.suspect_bound = 1
    scheduler.replicas[1].rows.suspects[sequence] = None


def shorten(scheduler: Scheduler) -> None:
    scheduler.room.followers[filling(scheduler)] = dict.fromkeys(scheduler.room.leaders, 0)


def host(scheduler: Scheduler) -> HostTier:
    tier = kv(scheduler).host
    assert tier is not None
    return tier


BREAKS: dict[str, Callable[[Scheduler], object]] = {
    "references equal tables": lambda s: kv(s).pool.holds.__setitem__(15, 1),
    "idle + used = total": lambda s: kv(s).pool.take(),
    "kept blocks are the findable idle ones": lambda s: kv(s).cache.forget(kv(s).pool.kept_blocks()[0]),
    "only full blocks are findable": lambda s: kv(s).cache.add(b"x", steady(s).block_ids[-1]),
    "a findable block never changes": lambda s: steady(s).token_ids.__setitem__(0, 9),
    "slots are unique": lambda s: s.replicas[1].rows.free_slots.append(0),
    "running is bounded": lambda s: setattr(s.replicas[1], "max_running", 1),
    "running is by rank": lambda s: s.replicas[1].rows.running.reverse(),
    "steady lists are parallel": lambda s: s.replicas[1].rows.steady.starts.append(1),
    "steady rows know their place": lambda s: s.replicas[1].rows.steady.slots.__setitem__(0, 1),
    "a row has one place": lambda s: s.replicas[1].rows.filling.append(steady(s)),
    "a steady row has one token to compute": lambda s: s.replicas[1].rows.steady.starts.__setitem__(0, 3),
    "a filling row has tokens to compute": lambda s: setattr(s.replicas[1].rows.filling[0], "num_planned_tokens", 20),
    "plans in flight are bounded": lambda s: setattr(s.replicas[1], "max_unanswered_plans", 0),
    "rows in flight run or departed": lambda s: s.replicas[1].rows.unanswered[0].departed.add(0),
    "waiting ones are queued": lambda s: s.room.remove(waiting(s)),
    "running ones have a replica": lambda s: setattr(waiting(s), "state", State.RUNNING),
    "waiting is counted": lambda s: setattr(s.room, "num_waiting", 5),
    "waiting tokens are counted": lambda s: setattr(s.room, "num_tokens", 5),
    "the queue holds live ones": lambda s: s.sequences.pop(waiting(s).sequence_id),
    "promises are of waiting ones and add up": lambda s: s.admissions.placement._num_rows.update({1: 1}),
    "nothing is held between plans": lambda s: host(s).pool.take(),
    "only findable blocks are demoted to": lambda s: host(s)._demotions.update({0: 0}),
    "running priorities are counted": lambda s: s.replicas[1].rows.priorities.update({5: 1}),
    "leaders run and are listed by their next block": lambda s: s.replicas[1].rows.in_flight._leaders.clear(),
    "running suspects are listed": lambda s: setattr(steady(s), "suspect_bound", 4),
    "suspects run in small groups": lambda s: suspect(steady(s), s),
    "followers wait beside the queue": lambda s: s.room.leaders.update({waiting(s): steady(s)}),
    "a follower has one leader": lambda s: s.room.followers.clear(),
    "leaders run": lambda s: setattr(filling(s), "state", State.SETTLING),
    "followers wait for what is not there": lambda s: shorten(s),
    "leaders are not worse than followers": lambda s: setattr(filling(s), "priority", 9),
    "tenants are counted": lambda s: s.room.tenants.clear(),
    "history is of live ones or bounded": lambda s: s.ledger.history.note(99, Decision(0, "queued", "")),
    "slots hold live ones": lambda s: s.sequences.pop(steady(s).sequence_id),
}  # fmt: skip


def test_a_crowded_core_breaks_no_law() -> None:
    laws.check(crowded())


@pytest.mark.parametrize("law", BREAKS)
def test_a_broken_law_is_named(law: str) -> None:
    scheduler = crowded()
    if law == "a findable block never changes":
        chain = steady(scheduler).chain
        assert chain is not None
        chain.digests.clear()  # so that it is hashed anew
    BREAKS[law](scheduler)
    with pytest.raises(laws.LawBroken) as caught:
        laws.check(scheduler)
    expected = {
        "idle + used = total": "references equal tables",  # the taken block is in no table, which is seen first
        "running ones have a replica": "waiting ones are queued",
        "leaders run": "rows in flight run or departed",
        "leaders are not worse than followers": "running priorities are counted",
    }
    assert caught.value.law == expected.get(law, law)


def test_blocks_are_given_out_blank_first_then_fresh_then_longest_kept() -> None:
    pool = BlockPool(6)
    taken = [pool.take() for _ in range(4)]
    assert taken == [0, 1, 2, 3]
    pool.release([0, 1, 2, 3], findable={0, 1})
    assert pool.idle_blocks() == [2, 3, 4, 5, 1, 0]
    pool.hold(1)
    assert pool.idle_blocks() == [2, 3, 4, 5, 0]
    assert [pool.take() for _ in range(5)] == [2, 3, 4, 5, 0]
    with pytest.raises(IndexError, match="all 6 blocks"):
        pool.take()
    with pytest.raises(ValueError, match="not held"):
        BlockPool(1).release([0], findable=())


def test_sizes_that_cannot_serve_are_refused() -> None:
    with pytest.raises(ValueError, match="block_size is 0"):
        spec(block_size=0)
    with pytest.raises(ValueError, match="max_waiting is 0"):
        CoreLimits(max_waiting=0)
    with pytest.raises(ValueError, match="max_num_seqs is 0"):
        CoreLimits(max_num_seqs=0)
    with pytest.raises(ValueError, match="max_overtakes is -1"):
        CoreLimits(max_overtakes=-1)
    assert isinstance(spec(), ReplicaSpec)


def test_the_core_imports_the_standard_library_alone() -> None:
    code = (
        "import sys; import scheduler_svc.core.scheduler, scheduler_svc.core.laws;"
        "print(sorted({name.split('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)"
        " - {'scheduler_svc', '__main__'}), 'asyncio' in sys.modules, 'random' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "False", "False"]
