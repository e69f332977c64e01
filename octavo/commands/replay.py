"""`octavo replay FILE`: makes a recording's decisions again, or compares them with those of other options."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from octavo.commands import command_line
from octavo.commands.planning import ReplayConfig
from octavo.cost_model import CostModel, parse_costs
from octavo.options import OptionError, from_args, given_options
from octavo.process import StartError
from scheduler_svc import replay as replaying
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.limits import core_limits
from scheduler_svc.measures import Summary, summarize, table
from scheduler_svc.recording import Recording, RecordingError, read
from scheduler_svc.replay import Replayed, limits_of
from scheduler_svc.whatif import fit_costs, workload_of


def replay(words: Sequence[str]) -> int:
    """Prints what came out; 1 when a decision came out otherwise, or the file cannot be replayed."""
    description = (
        "Make a recording's decisions again and compare each with what was recorded. With scheduler options, compare "
        "what the same requests would have been like under them."
    )
    namespace = command_line.parse("replay", description, words)
    try:
        config = from_args(ReplayConfig, namespace)
        if not config.file:
            raise OptionError("FILE", "unset", "needs a recording", "Write one with `octavo ctl dump FILE`")
        changes = changed_limits(namespace)
    except OptionError as error:
        command_line.refuse("octavo replay", [str(error)])
    try:
        content = Path(config.file).read_bytes()
    except OSError as error:
        remedy = "name a file that `octavo ctl dump FILE` wrote"
        raise StartError(f"{config.file} cannot be read: {error.strerror or error}; {remedy}") from error
    try:
        recording = read(content)
        return _compare(recording, config, changes) if changes else _repeat(recording)
    except RecordingError as error:
        raise StartError(f"{config.file}: {error}") from error


def changed_limits(namespace: Namespace) -> dict[str, object]:
    """The fields of CoreLimits that the given options change. Raises OptionError for a bad option."""
    given = given_options(SchedulerConfig, namespace)
    if not given:
        return {}
    ours, default = core_limits(from_args(SchedulerConfig, namespace)), CoreLimits()
    found = {
        field.name: getattr(ours, field.name)
        for field in fields(CoreLimits)
        if getattr(ours, field.name) != getattr(default, field.name)
    }
    # One that was given its default may still differ from the recording's.
    named = {_FIELD_OF[name]: getattr(ours, _FIELD_OF[name]) for name in given if name in _FIELD_OF}
    return {**found, **named}


_FIELD_OF = {
    "scheduling_policy": "policy",
    "aging_time": "aging_ns",
    "tenant_weights": "tenant_weights",
    "preemption_mode": "preemption_mode",
    "target_inter_token_latency_ms": "target_inter_token_ns",
    "max_prefill_tokens": "max_prefill_tokens",
    "expected_output_tokens": "expected_output_tokens",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "enable_prefix_caching": "enable_prefix_caching",
    "share_prefixes_between_tenants": "tenants_share_prefixes",
    "max_waiting_requests": "max_waiting",
    "max_waiting_tokens": "max_waiting_tokens",
    "max_waiting_requests_per_tenant": "max_waiting_per_tenant",
    "max_waiting_tokens_per_tenant": "max_waiting_tokens_per_tenant",
}


def _repeat(recording: Recording) -> int:
    again = replaying.replay(recording)
    print(describe(recording, again))
    if again.difference is not None:
        difference = again.difference
        print(
            f"record {difference.index} ({difference.input}, {difference.now_ns} ns) decided otherwise: "
            f"recorded by octavo {recording.header.software}"
        )
        return 1
    print("\n".join(table([("recorded", summarize(again.sequences.values()))])))
    return 0


def describe(recording: Recording, again: Replayed) -> str:
    """One line of what was replayed."""
    return (
        f"{again.num_records} inputs, {len(again.sequences)} requests, {len(again.steps)} steps"
        f"{', every decision as recorded' if again.difference is None else ''}; "
        f"recorded by octavo {recording.header.software} "
        f"with {'token ids' if recording.header.has_tokens else f'hashes of salt {recording.header.salt_id}'}"
    )


def _compare(recording: Recording, config: ReplayConfig, changes: dict[str, object]) -> int:
    columns: list[tuple[str, Summary]] = []
    again: Replayed | None = None
    if recording.exact_defect is None:
        again = replaying.replay(recording)
        if again.difference is None:
            columns.append(("recorded", summarize(again.sequences.values())))
        else:
            again = None
    if config.costs is not None:
        costs = parse_costs(config.costs)
    elif again is not None:
        costs = fit_costs(again.steps)
    else:
        raise RecordingError(
            f"its steps cannot be made again ({recording.exact_defect or 'decisions come out otherwise'}), so what "
            "they cost is not known; give --costs"
        )
    workload = workload_of(recording, again.sequences if again is not None else None)
    before = limits_of(recording)
    after = replace(before, **changes)  # type: ignore[arg-type]  # fields of CoreLimits, by changed_limits
    columns.append(("simulated", workload.simulate(before, costs)))
    columns.append(("changed", workload.simulate(after, costs)))
    print("\n".join(comparison(before, after, costs)))
    print("\n".join(table(columns)))
    return 0


def comparison(before: CoreLimits, after: CoreLimits, costs: CostModel) -> list[str]:
    """What the columns are."""
    lines = ["recorded: as it was.  simulated: the same limits, simulated.  changed: simulated with"]
    for field in fields(CoreLimits):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if old != new:
            lines.append(f"  {field.name} {getattr(new, 'value', new)} (was {getattr(old, 'value', old)})")
    lines.append(
        f"steps cost {costs.step_ms:.3g} ms + {1e6 / costs.prefill_tokens_per_s:.3g} us a prompt token + "
        f"{costs.row_us:.3g} us a row + {costs.kv_token_ns:.3g} ns a cached token"
    )
    return [*lines, ""]
