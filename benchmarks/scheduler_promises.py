"""What the scheduler's policies promise, checked in virtual time over simulated replicas. Nothing here is timed.

KV pressure, ways to preempt, fairness, prefix savings, and that a token budget which nobody fills changes nothing.
"""

from __future__ import annotations

import statistics
from random import Random

from benchmarks.scheduler_fleet import Costs, Fleet, replica_spec, request
from scheduler_svc.core.limits import CoreLimits, PreemptionMode, SchedulingPolicy
from scheduler_svc.core.scheduler import Scheduler

Figures = dict[str, object]
COSTS = Costs()
UNBOUNDED = {"max_waiting": 10**7, "max_waiting_tokens": 10**12}


def closed_loop(fleet: Fleet, num_clients: int, num_requests: int, num_in: int, num_out: int) -> float:
    """Output tokens per virtual second of clients that each send one request after the other."""
    random = Random(2)
    numbers = iter(range(1, num_requests + 1))

    def submit_one(_: int = 0) -> None:
        number = next(numbers, None)
        if number is not None:
            fleet.submit(request(number, [random.randrange(50_000) for _ in range(num_in)], num_out))

    fleet.on_finish = submit_one
    begun_ns, num_before = fleet.now, fleet.num_output_tokens
    for _ in range(num_clients):
        submit_one()
    fleet.run()
    return (fleet.num_output_tokens - num_before) / ((fleet.now - begun_ns) / 1e9)


def kv_pressure() -> Figures:
    """20 clients (128 in, 128 out) with KV for ten, against ten with ample KV."""
    figures: Figures = {}
    rates = {}
    for name, clients, blocks in (("ten, ample", 10, 100_000), ("twenty, KV for ten", 20, 160)):
        fleet = Fleet(Scheduler())
        fleet.attach(replica_spec(num_device_blocks=blocks, num_slots=64), COSTS)
        fleet.submit(request(10**9, range(128), 2))  # so short an answer is no guide to those that come
        fleet.run()
        rates[name] = closed_loop(fleet, clients, 200, 128, 128)
        replica = fleet.core.statistics().replicas[0]
        figures[name] = {
            "tokens_per_second": round(rates[name], 1),
            "preemptions": replica.num_preemptions,
            "recomputed_tokens": replica.num_recomputed_tokens,
        }
    return {**figures, "ratio": round(rates["twenty, KV for ten"] / rates["ten, ample"], 3)}


def displaced(mode: PreemptionMode, copy_ns: int) -> Fleet:
    """Long work, every second displaced from a pool that it fills by a burst of better work."""
    fleet = Fleet(Scheduler(CoreLimits(preemption_mode=mode)))
    fleet.attach(replica_spec(num_device_blocks=400, num_host_blocks=4_000, num_slots=16), Costs(copy_ns=copy_ns))
    random = Random(4)
    for number in range(10):
        fleet.submit(request(number + 1, [random.randrange(50_000) for _ in range(512)], 400, priority=1))
    fleet.plan_all()
    bursts = 0
    while fleet.step() or fleet.core.sequences:
        if fleet.now > bursts * 1_000_000_000 and bursts < 60:
            bursts += 1
            for number in range(5):
                prompt = [random.randrange(50_000) for _ in range(400)]
                fleet.submit(request(bursts * 1000 + number, prompt, 8))
            fleet.plan_all()
    return fleet


def preemption_modes() -> Figures:
    """Output tokens per virtual second where better work keeps displacing, with cheap and with dear copies."""
    figures: Figures = {}
    for name, copy_ns in (("cheap copies", 100_000), ("dear copies", 20_000_000)):
        rates = {}
        for mode in PreemptionMode:
            fleet = displaced(mode, copy_ns)
            rates[mode.value] = round(fleet.num_output_tokens / (fleet.now / 1e9), 1)
        best = max(rates["swap"], rates["recompute"])
        num_preemptions = fleet.core.statistics().replicas[0].num_preemptions
        figures[name] = {**rates, "auto : best": round(rates["auto"] / best, 3), "preemptions": num_preemptions}
    return figures


def fairness() -> Figures:
    """Served tokens of two tenants, of which one sends ten times more, equal weights, while both wait."""
    fleet = Fleet(Scheduler(CoreLimits(policy=SchedulingPolicy.FAIR, **UNBOUNDED)))  # type: ignore[arg-type]
    fleet.attach(replica_spec(num_slots=16), COSTS)
    random = Random(3)
    for number in range(2200):
        tenant = "few" if number % 11 == 0 else "many"
        prompt = [random.randrange(50_000) for _ in range(random.randint(20, 200))]
        fleet.submit(request(number + 1, prompt, random.randint(20, 200), tenant=tenant))
    fleet.plan_all()
    while fleet.step():
        tenants = fleet.core.room.tenants
        if tenants["few"][0] < 20:
            break
    served = {name: load.num_served_tokens for name, load in fleet.core.statistics().tenants.items()}
    return {**served, "few : many": round(served["few"] / served["many"], 3)}


def prefix_saving() -> Figures:
    """Mean time to the first token with a shared prefix cached, against the part of the prompt that is cached."""
    figures: Figures = {}
    for shared in (128, 512, 1024):
        times = {}
        for caching in (False, True):
            fleet = Fleet(Scheduler(CoreLimits(enable_prefix_caching=caching)))
            # No fixed cost, so that the ideal is the part of the tokens alone.
            fleet.attach(replica_spec(), Costs(step_ns=0))
            prefix = [number % 50_000 for number in range(shared)]
            fleet.submit(request(1, prefix, 1))
            fleet.run()
            for number in range(2, 34):
                fleet.submit(request(number, [*prefix, *([number] * 64)], 1))
                fleet.run()
            lives = [life for number, life in fleet.lives.items() if number > 1]
            times[caching] = statistics.mean((life.first_token_ns or 0) - life.submitted_ns for life in lives)
        saved, ideal = 1 - times[True] / times[False], shared / (shared + 64)
        figures[f"{shared}+64"] = {"saved": round(saved, 4), "of_the_ideal": round(saved / ideal, 4)}
    return figures


def unfilled_budget() -> Figures:
    """Whether the same workload is scheduled identically under a token budget that it never fills."""
    traces = []
    for budget in (4096, 65_536):
        fleet = Fleet(Scheduler(), trace=[])
        fleet.attach(replica_spec(max_step_tokens=budget, num_device_blocks=400, num_host_blocks=200), COSTS)
        closed_loop(fleet, 16, 100, 100, 60)
        traces.append(fleet.trace)
    assert traces[0] is not None
    return {"identical": traces[0] == traces[1], "num_plans": len(traces[0])}
