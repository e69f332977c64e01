"""`octavo plan`: what to expect of replicas that are only described, from the real scheduler in virtual time.

Imports the scheduler's core, and so runs in a process of its own, as a service does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.commands import command_line
from octavo.commands.planning import PlanConfig
from octavo.commands.tables import counted
from octavo.cost_model import CostModel, parse_costs
from octavo.options import OptionError, from_args
from octavo.workload import Entry, Mix, parse_sizes, read_entries
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import ReplicaSpec
from scheduler_svc.limits import core_limits
from scheduler_svc.measures import Summary, summarize, table
from scheduler_svc.simulation import Arrival, Simulation, Stay
from scheduler_svc.workload import MODEL, arrivals

# A run whose last requests end so much later than they came, relative to how long they took to come, fell behind.
_BEHIND = 0.2


@dataclass(frozen=True)
class Expectation:
    """What so many replicas do with the workload."""

    num_replicas: int
    summary: Summary
    busy_share: float
    """Of the time, that replicas computed."""
    lag_s: float
    """From the last arrival to the last end."""
    is_behind: bool
    first_refusal: str = ""
    """Why the first refused request was; empty: none was."""


def plan(words: Sequence[str]) -> int:
    """Prints what to expect; 1 when no number of replicas that was tried meets the target."""
    description = "Simulate replicas that are only described, with the real scheduler, in virtual time."
    namespace = command_line.parse("plan", description, words)
    try:
        config = from_args(PlanConfig, namespace)
        limits = core_limits(from_args(SchedulerConfig, namespace))
        entries = workload(config)
        spec, costs = replica_spec(config), parse_costs(config.costs)
    except OptionError as error:
        command_line.refuse("octavo plan", [str(error)])
    coming = arrivals(entries, spec.max_model_len)
    print("\n".join(heading(coming, num_cut(entries, spec.max_model_len), spec, costs)))

    def expect(num_replicas: int) -> Expectation:
        return simulate(coming, spec, num_replicas, limits, costs)

    if config.target_ttft_ms is None and config.target_tpot_ms is None:
        print("\n".join(report([expect(config.replicas or 1)])))
        return 0
    tried, chosen = search(expect, config)
    print("\n".join((*report(tried), "", verdict(chosen, config, spec))))
    return 0 if chosen is not None else 1


def workload(config: PlanConfig) -> list[Entry]:
    """The requests that the options describe, by time. Raises OptionError."""
    if config.trace is not None:
        try:
            return read_entries(Path(config.trace).read_text(encoding="utf-8").splitlines())
        except OSError as error:
            defect = f"it cannot be read ({error.strerror})"
            raise OptionError("--trace", config.trace, defect, "Name a file of requests, one a line") from None
        except UnicodeDecodeError:
            defect = "it is no text in UTF-8"
            raise OptionError("--trace", config.trace, defect, "Write one JSON object a line") from None
        except ValueError as error:
            raise OptionError("--trace", config.trace, str(error), "Write one JSON object a line") from None
    sizes = {}
    for flag, text in (("--prompt-tokens", config.prompt_tokens), ("--output-tokens", config.output_tokens)):
        try:
            sizes[flag] = parse_sizes(text)
        except ValueError as error:
            raise OptionError(flag, text, str(error), "Use a number such as 512") from None
    mix = Mix(
        config.request_rate,
        config.num_requests,
        sizes["--prompt-tokens"],
        sizes["--output-tokens"],
        config.num_prefixes,
        config.prefix_tokens,
        config.seed,
    )
    return mix.entries()


def num_cut(entries: Sequence[Entry], max_model_len: int) -> int:
    """How many are longer than a sequence may be, so that their arrivals are cut."""
    return sum(entry.prompt_tokens + entry.output_tokens > max_model_len for entry in entries)


def replica_spec(config: PlanConfig) -> ReplicaSpec:
    """The replica that the options describe. Raises OptionError when its KV cache holds no block."""
    costs = parse_costs(config.costs)
    num_blocks = config.num_kv_blocks or costs.num_blocks(config.kv_cache_memory, config.block_size)
    if num_blocks < 1:
        raise OptionError(
            "--kv-cache-memory", config.kv_cache_memory, "it holds no block", "Raise it, or lower kv_bytes"
        )
    return ReplicaSpec(
        replica_id=1,
        name="replica-1",
        incarnation=1,
        model=MODEL,
        fingerprint="described",
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        num_device_blocks=num_blocks,
        num_slots=config.max_num_seqs,
        max_step_tokens=config.max_num_batched_tokens,
        num_host_blocks=costs.num_blocks(int(config.swap_space * 2**30), config.block_size),
    )


def simulate(
    arrivals: Sequence[Arrival], spec: ReplicaSpec, num_replicas: int, limits: CoreLimits, costs: CostModel
) -> Expectation:
    """One run with so many replicas, all there from the start."""
    stays = [Stay(replace(spec, replica_id=n, name=f"replica-{n}", incarnation=n)) for n in range(1, num_replicas + 1)]
    run = Simulation(Scheduler(limits), costs).run(arrivals, stays)
    summary = summarize(run.times.values())
    first, last = arrivals[0].at_ns, arrivals[-1].at_ns
    lag_ns = run.end_ns - last
    # What the last requests take by themselves is no lag.
    alone_ns = max(_alone_ns(arrival, costs) for arrival in arrivals[-16:])
    return Expectation(
        num_replicas=num_replicas,
        summary=summary,
        busy_share=run.busy_ns / max(1, (run.end_ns - first) * num_replicas),
        lag_s=lag_ns / 1e9,
        is_behind=lag_ns - 2 * alone_ns > _BEHIND * (last - first),
        first_refusal=run.first_refusal,
    )


def _alone_ns(arrival: Arrival, costs: CostModel) -> int:
    """Time that a request takes on a replica of its own."""
    num_prompt = len(arrival.request.prompt_token_ids)
    return costs.step_ns(num_prompt, 0, 0) + arrival.num_output_tokens * costs.step_ns(0, 1, num_prompt)


def search(expect: Callable[[int], Expectation], config: PlanConfig) -> tuple[list[Expectation], Expectation | None]:
    """The runs that were tried, by number of replicas, and the least that meets the target, if one does.

    Doubles from one replica on until the target is met, then halves the gap: more replicas do no worse, up to chance.
    """
    tried: dict[int, Expectation] = {}

    def meets(num_replicas: int) -> bool:
        tried[num_replicas] = expect(num_replicas)
        return meets_target(tried[num_replicas], config)

    if config.replicas is not None:
        good = meets(config.replicas)
        return list(tried.values()), tried[config.replicas] if good else None
    low, high = 0, 1
    while not meets(high):
        if high >= config.max_replicas:
            return _by_number(tried), None
        low, high = high, min(2 * high, config.max_replicas)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return _by_number(tried), tried[high]


def _by_number(tried: dict[int, Expectation]) -> list[Expectation]:
    return [tried[number] for number in sorted(tried)]


def meets_target(expectation: Expectation, config: PlanConfig) -> bool:
    """Whether it keeps up, refuses nothing, and 95 of 100 requests are within the target."""
    summary = expectation.summary
    ttft, tpot = config.target_ttft_ms, config.target_tpot_ms
    is_fast = (ttft is None or summary.ttft_p95_ms <= ttft) and (tpot is None or summary.tpot_p95_ms <= tpot)
    return is_fast and not expectation.is_behind and summary.num_refused == 0


def heading(arrivals: Sequence[Arrival], num_cut: int, spec: ReplicaSpec, costs: CostModel) -> list[str]:
    """What is simulated."""
    span_s = (arrivals[-1].at_ns - arrivals[0].at_ns) / 1e9
    num_prompt = sum(len(arrival.request.prompt_token_ids) for arrival in arrivals)
    num_output = sum(arrival.num_output_tokens for arrival in arrivals)
    host = f", {spec.num_host_blocks} on the host" if spec.num_host_blocks else ""
    when, rate = (
        ("at once", "") if not span_s else (f"in {span_s:.1f} s", f", {num_output / span_s:.0f} output tokens/s")
    )
    cut = [f"          {num_cut} of them cut to the longest sequence, {spec.max_model_len} tokens"] if num_cut else []
    return [
        f"workload  {len(arrivals)} requests {when}: {num_prompt / len(arrivals):.0f} prompt and "
        f"{num_output / len(arrivals):.0f} output tokens each on average{rate}",
        *cut,
        f"replica   {spec.num_device_blocks} KV blocks of {spec.block_size} tokens{host}, {spec.num_slots} sequences, "
        f"{spec.max_step_tokens} tokens a step",
        f"costs     {costs.prefill_tokens_per_s:g} prompt tokens/s; a step {costs.step_ms:g} ms + {costs.row_us:g} us "
        f"a row + {costs.kv_token_ns:g} ns a cached token",
        "",
    ]


def report(expectations: Sequence[Expectation]) -> list[str]:
    """The table, one column for each number of replicas."""
    columns = [(_replicas(each.num_replicas), each.summary) for each in expectations]
    lines = table(columns)
    widths = [max(12, len(name) + 2) for name, _ in columns]
    busy = "".join(f"{each.busy_share:>{width}.1%}" for each, width in zip(expectations, widths, strict=True))
    lines.append(f"{'replicas busy':<26}{busy}")
    lines += [
        f"{_replicas(each.num_replicas)}: the queue grows while requests come; the last one ends {each.lag_s:.1f} s "
        "after the last came"
        for each in expectations
        if each.is_behind
    ]
    lines += [
        f"{_replicas(each.num_replicas)}: {each.summary.num_refused} requests were refused; the first was "
        f"{each.first_refusal}"
        for each in expectations
        if each.first_refusal
    ]
    return lines


def verdict(chosen: Expectation | None, config: PlanConfig, spec: ReplicaSpec) -> str:
    """Whether the target is met, and by how many."""
    wanted = [
        f"{name} p95 of {limit:g} ms"
        for name, limit in (("TTFT", config.target_ttft_ms), ("TPOT", config.target_tpot_ms))
        if limit is not None
    ]
    target = " and ".join(wanted)
    if chosen is not None:
        return f"{_replicas(chosen.num_replicas)} meet{'s' if chosen.num_replicas == 1 else ''} the target: {target}"
    tried = config.replicas or config.max_replicas
    return (
        f"not even {_replicas(tried)} meet the target: {target}. More replicas shorten queues alone; where TTFT or "
        f"TPOT stay too long without a queue, lower --max-num-batched-tokens (now {spec.max_step_tokens}) or "
        f"--max-num-seqs (now {spec.num_slots})"
    )


def _replicas(number: int) -> str:
    return counted(number, "replica")


if __name__ == "__main__":
    sys.exit(plan(sys.argv[1:]))
