"""The core under long seeded walks: as the state machine of test_machine, but crowded and for hundreds of steps."""

from __future__ import annotations

import os
from collections.abc import Callable
from random import Random

import pytest

from scheduler_svc.core.limits import CoreLimits, PreemptionMode, SchedulingPolicy
from scheduler_svc.core.types import RefusalReason, Refused
from tests.core.house import House, Stream, spec

_NUM_WALKS = int(os.environ.get("OCTAVO_CORE_WALKS", "30"))
_STRETCHES = [[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 9], [7], [8, 9], list(range(20, 32))]


class Walk:
    """One history. Every choice comes from the seed."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.num_blocks = random.randint(6, 20)
        self.changes = {
            "num_device_blocks": self.num_blocks,
            "num_slots": random.randint(1, 6),
            "max_step_tokens": random.choice([1, 3, 8, 20, 40]),
            "num_host_blocks": random.choice([0, 0, 3, 12, 60]),
        }
        self.copy_ns = random.choice([0, 10, 1_000_000])
        limits = CoreLimits(
            enable_prefix_caching=random.random() < 0.8,
            max_unanswered_plans=random.choice([1, 2, 2, 2, 3]),
            max_overtakes=random.choice([0, 2, 64]),
            max_waiting=random.choice([3, 30]),
            max_waiting_per_tenant=random.choice([None, None, 4]),
            policy=random.choice(list(SchedulingPolicy)),
            aging_ns=random.choice([5_000, 1_000_000_000]),
            preemption_mode=random.choice([PreemptionMode.AUTO, PreemptionMode.AUTO, PreemptionMode.RECOMPUTE]),
            tenant_weights={"t": random.choice([0.5, 1.0, 4.0])},
            target_inter_token_ns=random.choice([None, None, 1_010_000]),
            max_prefill_tokens=random.choice([None, None, 6]),
            expected_output_tokens=random.choice([0, 0, 12]),
        )
        self.house = House(limits)
        self.num_attached = 0
        self.priorities = random.choice([[0], [0, 0, 1], [-1, 0, 1]])

    def go(self, num_steps: int) -> None:
        """Walks, then lets everything end and looks at what came out."""
        moves: list[tuple[int, Callable[[], None]]] = [
            (6, self.submit), (1, self.cancel), (1, self.attach), (1, self.detach), (1, self.disturb),
            (1, self.update), (1, self.drain_one), (1, self.tick),
            (20, self.plan), (20, self.run), (18, self.complete),
        ]  # fmt: skip
        weights = [weight for weight, _ in moves]
        self.attach()
        for _ in range(num_steps):
            self.random.choices(moves, weights)[0][1]()
        for replica in self.house.replicas.values():
            replica.unreachable_routers = set()
        if all(replica.is_draining for replica in self.house.scheduler.replicas.values()):
            self.attach_another()
        self.house.drain()
        self.house.check_outcomes(num_cache_tokens=self.num_blocks * 4)

    def submit(self) -> None:
        random = self.random
        prompt = [token for _ in range(random.randint(1, 5)) for token in random.choice(_STRETCHES)]
        try:
            self.house.submit(
                prompt,
                max_tokens=random.randint(1, 60),
                priority=random.choice(self.priorities),
                tenant=random.choice(["", "", "t"]),
                end_token_ids=random.choice([(), (3, 17)]),
                prompt_logprobs_start=random.choice([None, None, None, 0, 5, 9]),
                router_id=random.randint(0, 2),
                age_ns=random.choice([0, 0, 5000]),
                deadline_ns=random.choice([None] * 8 + [20_000, 300_000]),
                queue_events=random.random() < 0.2,
            )
        except Refused as refused:
            if refused.reason not in (RefusalReason.QUEUE_FULL, RefusalReason.TOO_LONG, RefusalReason.DEADLINE):
                raise

    def cancel(self) -> None:
        live = [stream for stream in self.house.streams.values() if stream.is_live]
        if live:
            self.house.cancel(self.random.choice(live))

    def update(self) -> None:
        live = [stream for stream in self.house.streams.values() if stream.is_live]
        if live:
            priority, deadline_ns = self.random.choice([(-1, None), (2, None), (None, 50_000)])
            self.house.update(self.random.choice(live), priority, deadline_ns)

    def tick(self) -> None:
        self.house.tick()

    def attach(self) -> None:
        if len(self.house.replicas) < 3:
            self.attach_another()

    def attach_another(self) -> None:
        self.num_attached += 1
        simulated = self.house.attach(spec(self.num_attached, **self.changes))
        simulated.copy_ns, simulated.token_ns = self.copy_ns, 1000

    def drain_one(self) -> None:
        if len(self.house.replicas) > 1 and self.random.random() < 0.3:
            self.house.drain_replica(self.random.choice(list(self.house.replicas)))

    def detach(self) -> None:
        if self.house.replicas and self.random.random() < 0.3:
            self.house.detach(self.random.choice(list(self.house.replicas)))

    def disturb(self) -> None:
        self.house.scheduler.reset_prefix_cache()
        live: list[Stream] = [stream for stream in self.house.streams.values() if stream.is_live]
        for replica in self.house.replicas.values():
            replica.unreachable_routers = {0} if self.random.random() < 0.3 else set()
            if live and self.random.random() < 0.5:
                replica.numeric_errors = {self.random.choice(live).request.stream_key}

    def plan(self) -> None:
        if self.house.replicas:
            self.house.plan(self.random.choice(list(self.house.replicas)))

    def run(self) -> None:
        ready = [replica_id for replica_id, replica in self.house.replicas.items() if replica.inbox]
        if ready:
            self.house.run(self.random.choice(ready))

    def complete(self) -> None:
        ready = [replica_id for replica_id, results in self.house.results.items() if results]
        if ready:
            self.house.complete(self.random.choice(ready))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(_NUM_WALKS, _NUM_WALKS + 1000))
def test_any_walk_ends_well_also_in_rarer_histories(seed: int) -> None:
    Walk(seed).go(num_steps=400)


@pytest.mark.parametrize("seed", range(_NUM_WALKS))
def test_any_walk_ends_well(seed: int) -> None:
    Walk(seed).go(num_steps=400)
