"""Times the scheduler core and checks, in virtual time, what its policies promise. `--json FILE` writes the figures.

Timed, in CPU time: what is in `scheduler_steps.py`; the lookup of a long prefix; a fleet of 100 replicas in one
process. Counted: memory per sequence. Simulated: what is in `scheduler_promises.py`. With `--vllm-python PATH` (an
interpreter that has vllm) vLLM's own Scheduler class is timed beside ours. `--million` does one thing alone, for some
minutes: a million distinct prompts, one after the other, and what each hundred thousand cost.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import resource
import subprocess
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from random import Random

from benchmarks.scheduler_fleet import Costs, Fleet, replica_spec, request
from benchmarks.scheduler_promises import (
    COSTS,
    UNBOUNDED,
    Figures,
    fairness,
    kv_pressure,
    preemption_modes,
    prefix_saving,
    unfilled_budget,
)
from benchmarks.scheduler_steps import against_pool, against_waiting, steady_decode
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.scheduler import Scheduler

# Timed ----------------------------------------------------------------------------------------------------------------


def long_prefix() -> Figures:
    """Lookup of a cached prefix of 32k tokens, milliseconds: the first time, which hashes, and again."""
    fleet = Fleet(Scheduler(CoreLimits(**UNBOUNDED)))  # type: ignore[arg-type]
    fleet.attach(replica_spec(), COSTS)
    prompt = [number * 31 % 50_000 for number in range(32_769)]
    fleet.submit(request(1, prompt, 1))
    fleet.run()
    kv = fleet.core.replicas[1].kv
    first, again = [], []
    for number in range(15):
        fleet.submit(request(2 + number, prompt, 1))
        sequence = fleet.core.sequences[2 + number]
        begin = time.thread_time()
        found = kv.find_prefix(sequence)
        first.append(time.thread_time() - begin)
        begin = time.thread_time()
        kv.find_prefix(sequence)
        again.append(time.thread_time() - begin)
        assert found.num_blocks == 2048
    return {"first_ms": round(min(first) * 1e3, 3), "again_ms": round(min(again) * 1e3, 3)}


def memory() -> Figures:
    """Bytes that a waiting and a running sequence of 200 tokens take."""
    gc.collect()
    tracemalloc.start()
    core = Scheduler(CoreLimits(**UNBOUNDED))  # type: ignore[arg-type]
    core.attach(replica_spec(num_slots=2000, max_step_tokens=400_000), 0)
    empty, _ = tracemalloc.get_traced_memory()
    prompts = [[(number * 7 + place) % 50_000 for place in range(200)] for number in range(2000)]
    with_prompts, _ = tracemalloc.get_traced_memory()
    for number, prompt in enumerate(prompts):
        core.submit(request(number + 1, prompt, 100), 0)
    waiting, _ = tracemalloc.get_traced_memory()
    core.plan(1, 1)
    running, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(core.replicas[1].rows.running) == 2000
    return {
        "waiting_bytes": (waiting - with_prompts) // 2000,
        "running_bytes": (running - with_prompts) // 2000,
        "empty_core_bytes": empty,
    }


def hundred_replicas(num_replicas: int = 100, num_live: int = 10_000) -> Figures:
    """A closed loop over 100 replicas in one process: tokens that the core decides per second of real time."""
    random = Random(1)
    fleet = Fleet(Scheduler(CoreLimits(**UNBOUNDED)))  # type: ignore[arg-type]
    costs = Costs(step_ns=6_000_000, token_ns=20_000)
    for replica_id in range(1, num_replicas + 1):
        fleet.attach(replica_spec(replica_id, num_slots=128, num_device_blocks=6_000), costs)
    numbers = iter(range(1, 10**9))

    def submit_one(_: int = 0) -> None:
        prompt = [random.randrange(50_000) for _ in range(random.randint(50, 200))]
        fleet.submit(request(next(numbers), prompt, random.randint(50, 200)))

    fleet.on_finish = submit_one
    for _ in range(num_live):
        submit_one()
    fleet.plan_all()
    while fleet.num_output_tokens < 100_000:
        fleet.step()
    before, begin, virtual = fleet.num_output_tokens, time.thread_time(), fleet.now
    idle = 0
    for _ in range(4_000):
        fleet.step()
        idle += sum(1 for worker in fleet.workers.values() if not worker.is_busy) if fleet.core.room.num_waiting else 0
    took = time.thread_time() - begin
    tokens = fleet.num_output_tokens - before
    load = [replica.num_running for replica in fleet.core.statistics().replicas]
    return {
        "tokens_per_second_real": round(tokens / took),
        "tokens_per_second_virtual": round(tokens / ((fleet.now - virtual) / 1e9)),
        "steps_per_second_real": round(4_000 / took),
        "idle_replica_sightings_while_work_waits": idle,
        "running_per_replica": [min(load), max(load)],
        "time_by_function": profiled(fleet),
    }


def profiled(fleet: Fleet, num_steps: int = 1_000) -> Figures:
    """Parts of the core's own time by function, the largest first; the simulated replicas' are not counted."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(num_steps):
        fleet.step()
    profile.disable()
    found: dict[str, float] = {}
    for (path, _, name), (_, _, own, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        if "/scheduler_svc/" in path:
            found[f"{Path(path).stem}.{name}"] = found.get(f"{Path(path).stem}.{name}", 0.0) + own
    total = sum(found.values())
    largest = sorted(found, key=lambda name: -found[name])[:12]
    return {name: round(found[name] / total, 3) for name in largest}


# Run long -----------------------------------------------------------------------------------------------------------


def distinct_prompts(num_prompts: int = 10_000) -> Figures:
    """Memory of the core and time of a request after some and after many distinct prompts."""
    fleet = Fleet(Scheduler())
    fleet.attach(replica_spec(num_device_blocks=2_000, num_host_blocks=4_000, num_slots=8), COSTS)
    figures: Figures = {}
    tracemalloc.start()
    begin = time.thread_time()
    for number in range(1, num_prompts + 1):
        fleet.submit(request(number, [number, *range(63)], 2))
        fleet.run()
        fleet.lives.clear()
        if number in (num_prompts // 2, num_prompts):
            took = (time.thread_time() - begin) / (num_prompts // 2)
            begin = time.thread_time()
            held = tracemalloc.get_traced_memory()[0]
            figures[str(number)] = {"held_bytes": held, "ms_per_request": round(took * 1e3, 3)}
    tracemalloc.stop()
    return figures


def million_prompts(num_prompts: int = 1_000_000, num_parts: int = 10) -> Figures:
    """Most memory that the process ever held, and time of a request, after each part of many distinct prompts.

    The pool and the host tier are full, and full of what is never asked for again, long before the first part ends.
    """
    fleet = Fleet(Scheduler())
    fleet.attach(replica_spec(num_device_blocks=2_000, num_host_blocks=4_000, num_slots=8), COSTS)
    parts: dict[str, dict[str, float]] = {}
    size, begin = num_prompts // num_parts, time.thread_time()
    for number in range(1, num_prompts + 1):
        fleet.submit(request(number, [number, *range(63)], 2))
        fleet.run()
        fleet.lives.clear()
        if number % size == 0:
            took, begin = time.thread_time() - begin, time.thread_time()
            most_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # KiB on Linux
            parts[str(number)] = {"most_mib": round(most_mib, 1), "ms_per_request": round(took / size * 1e3, 4)}
            print(f"{number} prompts: {json.dumps(parts[str(number)])}", flush=True)
    found = list(parts.values())
    return {
        **parts,
        "memory, last : first": round(found[-1]["most_mib"] / found[0]["most_mib"], 3),
        "time, last : first": round(found[-1]["ms_per_request"] / found[0]["ms_per_request"], 3),
    }


SECTIONS: dict[str, Callable[[], Figures]] = {
    "steady decode, ms per step": steady_decode,
    "ms per step against waiting": against_waiting,
    "ms per step against blocks": against_pool,
    "32k-token prefix": long_prefix,
    "memory per sequence": memory,
    "100 replicas, 10,000 live": hundred_replicas,
    "100 replicas, 14,000 live, so that some wait": lambda: hundred_replicas(num_live=14_000),
    "KV pressure": kv_pressure,
    "ways to preempt": preemption_modes,
    "two tenants, 10 : 1": fairness,
    "prefix savings": prefix_saving,
    "a budget never filled": unfilled_budget,
    "distinct prompts": distinct_prompts,
}


def vllm_figures(python: str, model: str) -> Figures:
    """vLLM's Scheduler in its own interpreter, the same steady decode."""
    script = Path(__file__).parent / "vllm_scheduler.py"
    done = subprocess.run([python, str(script), model], capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1:]}
    figures: Figures = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def main() -> None:
    """Runs the sections asked for and prints them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--only", help="run the sections whose name contains this")
    parser.add_argument("--million", action="store_true", help="run a million distinct prompts, and nothing else")
    parser.add_argument("--vllm-python", help="interpreter with vllm, for the comparison")
    parser.add_argument("--vllm-model", default=".", help="directory of a model that vllm can read the config of")
    options = parser.parse_args()
    figures: dict[str, Figures] = {}
    begun = time.monotonic()
    sections = {"a million distinct prompts": million_prompts} if options.million else SECTIONS
    for name, section in sections.items():
        if options.only is None or options.only in name:
            figures[name] = section()
            print(f"{name}: {json.dumps(figures[name])}", flush=True)
    if options.vllm_python and not options.million:
        figures["vllm steady decode, ms per step"] = vllm_figures(options.vllm_python, options.vllm_model)
        print(f"vllm: {json.dumps(figures['vllm steady decode, ms per step'])}")
    figures["run"] = {"seconds": round(time.monotonic() - begun, 1)}
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
