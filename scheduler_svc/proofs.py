"""A proof that the scheduler's core keeps its laws here, in seconds, for `octavo doctor --run`.

A crowded workload in virtual time: too many sequences for the KV blocks, so that some are preempted, with shared
prefixes, two tiers, a cancellation and a replica that goes away. Every law is checked after every call of the core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from octavo.cost_model import CostModel
from octavo.workload import Mix, parse_sizes
from scheduler_svc.core import laws
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import ReplicaSpec
from scheduler_svc.simulation import Arrival, Simulation, Stay
from scheduler_svc.workload import MODEL, arrivals

_NUM_REQUESTS = 80
_MAX_MODEL_LEN = 256
_CALLS = frozenset({"submit", "cancel", "attach", "detach", "plan", "complete", "tick"})


class _Watched:
    """Stands before a core and checks its laws after each call that may change it."""

    def __init__(self, core: Scheduler) -> None:
        self.num_calls = 0
        self._core = core

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._core, name)
        if name not in _CALLS:
            return value

        def call(*arguments: Any, **named: Any) -> Any:
            try:
                return value(*arguments, **named)
            finally:
                self.num_calls += 1
                laws.check(self._core)

        return call


def prove_laws(core: Scheduler | None = None) -> str:
    """Returns what was run, on a fresh core. Raises AssertionError when a law is broken or a sequence lost."""
    core = core or Scheduler(CoreLimits())
    watched = _Watched(core)
    costs = CostModel(prefill_tokens_per_s=20_000, step_ms=5)
    run = Simulation(cast(Scheduler, watched), costs).run(_workload(), _stays())
    _demand(run.is_complete, "sequences never ended")
    times = list(run.times.values())
    _demand(len(times) == _NUM_REQUESTS, f"{len(times)} of {_NUM_REQUESTS} sequences were submitted")
    _demand(all(each.ended_ns is not None for each in times), "a sequence has no end")
    num_preempted = sum(each.num_preemptions for each in times)
    num_cached = sum(each.num_cached_tokens for each in times)
    _demand(num_preempted > 0, "nothing was preempted: the workload was too small")
    _demand(num_cached > 0, "nothing was found in the prefix cache")
    for statistics in core.statistics().replicas:
        _demand(statistics.num_used_blocks == 0, f"{statistics.num_used_blocks} blocks are held after the end")
    return (
        f"every law held after each of {watched.num_calls} calls: {_NUM_REQUESTS} sequences, {run.num_steps} steps, "
        f"{num_preempted} preemptions, {num_cached} tokens from the prefix cache, a replica lost"
    )


def _workload() -> Sequence[Arrival]:
    mix = Mix(
        requests_per_s=60.0,
        num_requests=_NUM_REQUESTS,
        prompt_tokens=parse_sizes("uniform:20:120"),
        output_tokens=parse_sizes("uniform:5:100"),
        num_prefixes=4,
        prefix_tokens=48,
        seed=1,
    )
    found = arrivals(mix.entries(), _MAX_MODEL_LEN)
    return [replace(found[0], cancel_at_ns=found[0].at_ns + 20_000_000), *found[1:]]


def _stays() -> list[Stay]:
    first = ReplicaSpec(
        replica_id=1,
        name="replica-1",
        incarnation=1,
        model=MODEL,
        fingerprint="proof",
        max_model_len=_MAX_MODEL_LEN,
        block_size=16,
        num_device_blocks=40,
        num_slots=12,
        max_step_tokens=128,
        num_host_blocks=40,
    )
    second = replace(first, replica_id=2, name="replica-2", incarnation=2, num_host_blocks=0)
    return [Stay(first), Stay(second, detach_at_ns=600_000_000)]


def _demand(holds: bool, complaint: str) -> None:
    if not holds:
        raise AssertionError(complaint)
