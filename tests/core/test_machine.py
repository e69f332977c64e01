"""The core under random histories: submissions, cancels, plans, answers, joins and losses in any order."""

from __future__ import annotations

import os
from itertools import chain

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from scheduler_svc.core import laws
from scheduler_svc.core.limits import CoreLimits, PreemptionMode, SchedulingPolicy
from scheduler_svc.core.types import RefusalReason, Refused
from scheduler_svc.state import capture, read, write
from tests.core.house import House, Stream, spec

# Prompts are made of few stretches, so that prefixes are shared, at block edges and beside them.
_STRETCHES = [[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 9], [7], [8, 9]]
_prompts = st.lists(st.sampled_from(_STRETCHES), min_size=1, max_size=6).map(
    lambda parts: list(chain.from_iterable(parts))
)


class CoreMachine(RuleBasedStateMachine):
    """Rules are what can happen; the house checks laws, plans, events and tokens at each."""

    def __init__(self) -> None:
        super().__init__()
        self.house = House()
        self.changes: dict[str, int] = {}
        self.num_attached = 0

    @initialize(
        num_blocks=st.integers(6, 16),
        num_slots=st.integers(1, 5),
        max_step_tokens=st.integers(1, 20),
        caching=st.booleans(),
        depth=st.integers(1, 3),
        max_overtakes=st.integers(0, 3),
        num_host_blocks=st.sampled_from([0, 2, 8, 40]),
        policy=st.sampled_from(SchedulingPolicy),
        mode=st.sampled_from(PreemptionMode),
        cap=st.sampled_from([None, 3]),
        num_expected=st.sampled_from([0, 0, 10]),
    )
    def set_up(
        self,
        num_blocks: int,
        num_slots: int,
        max_step_tokens: int,
        caching: bool,
        depth: int,
        max_overtakes: int,
        num_host_blocks: int,
        policy: SchedulingPolicy,
        mode: PreemptionMode,
        cap: int | None,
        num_expected: int,
    ) -> None:
        limits = CoreLimits(
            enable_prefix_caching=caching,
            max_unanswered_plans=depth,
            max_overtakes=max_overtakes,
            max_waiting=12,
            policy=policy,
            aging_ns=20_000,
            preemption_mode=mode if caching or mode is not PreemptionMode.SWAP else PreemptionMode.AUTO,
            tenant_weights={"t": 3.0},
            max_prefill_tokens=cap,
            expected_output_tokens=num_expected,
        )
        self.house = House(limits)
        self.changes = {
            "num_device_blocks": num_blocks,
            "num_slots": num_slots,
            "max_step_tokens": max_step_tokens,
            "num_host_blocks": num_host_blocks,
        }
        self.attach()

    def _live(self) -> list[Stream]:
        return [stream for stream in self.house.streams.values() if stream.is_live]

    @rule(
        prompts=st.lists(_prompts, min_size=1, max_size=4),
        max_tokens=st.integers(1, 50),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from(["", "t"]),
        end_token_ids=st.sampled_from([(), (3, 17), tuple(range(12))]),
        start=st.sampled_from([None, None, 0, 4, 6]),
        router_id=st.integers(0, 1),
        age_ns=st.sampled_from([0, 5000]),
        deadline_ns=st.sampled_from([None, None, None, 10_000, 1_000_000]),
        queue_events=st.booleans(),
    )
    def submit(self, prompts: list[list[int]], start: int | None, **fields: object) -> None:
        for prompt in prompts:
            try:
                self.house.submit(prompt, prompt_logprobs_start=start, **fields)  # type: ignore[arg-type]
            except Refused as refused:
                if refused.reason not in (RefusalReason.QUEUE_FULL, RefusalReason.TOO_LONG, RefusalReason.DEADLINE):
                    raise

    @precondition(lambda self: self._live())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(self._live()))
        self.house.cancel(stream)
        assert not stream.is_live

    @precondition(lambda self: self._live())
    @rule(data=st.data(), priority=st.sampled_from([None, -1, 2]), deadline_ns=st.sampled_from([None, 1_000, 100_000]))
    def update(self, data: st.DataObject, priority: int | None, deadline_ns: int | None) -> None:
        self.house.update(data.draw(st.sampled_from(self._live())), priority, deadline_ns)

    @rule()
    def tick(self) -> None:
        self.house.tick()

    @precondition(lambda self: len(self.house.replicas) == 2)
    @rule(data=st.data())
    def drain_one(self, data: st.DataObject) -> None:
        self.house.drain_replica(data.draw(st.sampled_from(sorted(self.house.replicas))))

    @precondition(lambda self: self.house.replicas)
    @rule(data=st.data())
    def undrain_one(self, data: st.DataObject) -> None:
        self.house.undrain_replica(data.draw(st.sampled_from(sorted(self.house.replicas))))

    @precondition(lambda self: len(self.house.replicas) < 2)
    @rule()
    def attach(self) -> None:
        self.num_attached += 1
        self.house.attach(spec(self.num_attached, **self.changes))

    @precondition(lambda self: self.house.replicas)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        self.house.detach(data.draw(st.sampled_from(sorted(self.house.replicas))))

    @precondition(lambda self: self.house.replicas)
    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        self.house.plan(data.draw(st.sampled_from(sorted(self.house.replicas))))

    @precondition(lambda self: any(replica.inbox for replica in self.house.replicas.values()))
    @rule(data=st.data())
    def run(self, data: st.DataObject) -> None:
        ids = sorted(replica_id for replica_id, replica in self.house.replicas.items() if replica.inbox)
        self.house.run(data.draw(st.sampled_from(ids)))

    @precondition(lambda self: any(self.house.results.values()))
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        ids = sorted(replica_id for replica_id, results in self.house.results.items() if results)
        self.house.complete(data.draw(st.sampled_from(ids)))

    @precondition(lambda self: self.house.replicas)
    @rule(
        num_rounds=st.integers(1, 12),
        unreachable=st.sampled_from([set[int](), set[int](), {1}]),
        num_bad=st.sampled_from([0, 0, 1]),
        answers=st.booleans(),
    )
    def go_on(self, num_rounds: int, unreachable: set[int], num_bad: int, answers: bool) -> None:
        """Some rounds with all replicas; a router may be out of reach and a row's numerics break meanwhile."""
        for replica in self.house.replicas.values():
            replica.unreachable_routers = set(unreachable)
            replica.numeric_errors = {stream.request.stream_key for stream in self._live()[:num_bad]}
        for _ in range(num_rounds):
            for replica_id in list(self.house.replicas):
                self.house.plan(replica_id)
                if self.house.replicas[replica_id].inbox:
                    self.house.run(replica_id)
                if answers and self.house.results[replica_id]:
                    self.house.complete(replica_id)

    @rule()
    def read_its_state_back(self) -> None:
        """A core in the same state obeys the laws, and its state is written alike."""
        core = self.house.scheduler
        state = capture(core)
        text = write(state, str, bytes)
        again = read(text, core.limits, {request.sequence_id: request for request in state.requests})
        laws.check(again)
        assert write(capture(again), str, bytes) == text
        assert again.statistics() == core.statistics()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.house.scheduler.reset_prefix_cache()

    def teardown(self) -> None:
        if not self.changes:
            return
        for replica in self.house.replicas.values():
            replica.unreachable_routers = set()
        if all(replica.is_draining for replica in self.house.scheduler.replicas.values()):
            self.attach()
        self.house.drain()
        self.house.check_outcomes(num_cache_tokens=self.changes["num_device_blocks"] * 4)


_NUM_HISTORIES = int(os.environ.get("OCTAVO_CORE_HISTORIES", "120"))

TestCore = CoreMachine.TestCase
TestCore.settings = settings(
    max_examples=_NUM_HISTORIES,
    stateful_step_count=40,
    derandomize="OCTAVO_CORE_HISTORIES" not in os.environ,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
