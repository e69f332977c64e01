"""The result of a comparison: what is kept as JSON, and the tables made from it.

Pure: it reads what was measured and computes ratios. A ratio is Octavo's figure over the better peer's; where no peer
was measured there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.comparison.client import Measurement
from benchmarks.comparison.workloads import WORKLOADS, Workload

# More than this kept busy by others while a workload ran: its line is marked.
DISTURBED_CORES = 0.1


@dataclass
class Run:
    """One contender's turn; `failures` says by workload, or for `start`, why there is no figure."""

    name: str
    kind: str
    version: str
    settings: str
    first_token_s: float | None = None
    measurements: dict[str, Measurement] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


@dataclass
class Report:
    """Everything that one comparison found. `start_s` and `step_profile` are Octavo's own."""

    date: str
    machine: dict[str, Any]
    scale: float
    waited_for_quiet: bool
    workloads: list[str]
    runs: list[Run] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    start_s: dict[str, float | str] = field(default_factory=dict)
    step_profile: dict[str, Any] | str = "not run"
    seconds: float = 0.0


@dataclass(frozen=True)
class _Metric:
    title: str
    read: Callable[[Measurement], float]
    best: Callable[[Iterable[float]], float]
    sign: str
    aim: Callable[[Workload], float | None]


_METRICS = (
    _Metric("Output tokens/s", lambda m: m.output_tokens_per_s, max, "≥", lambda w: w.throughput_aim),
    _Metric("Mean TTFT, ms", lambda m: m.mean_ttft_ms, min, "≤", lambda w: w.ttft_aim),
    _Metric("Mean TPOT, ms", lambda m: m.mean_tpot_ms, min, "≤", lambda _: None),
)


def ratio(report: Report, workload: Workload, metric: _Metric) -> float | None:
    """Octavo's best variant over the peers' best variant on one workload."""
    ours = [metric.read(found) for found in _measured(report, workload, {"octavo"})]
    theirs = [metric.read(found) for found in _measured(report, workload, {"vllm", "llama"})]
    return metric.best(ours) / metric.best(theirs) if ours and theirs else None


def ratios(report: Report) -> dict[str, dict[str, float | None]]:
    """By metric's title and workload."""
    return {
        metric.title: {name: ratio(report, WORKLOADS[name], metric) for name in report.workloads} for metric in _METRICS
    }


def markdown(report: Report) -> str:
    """The report for people: the conditions, a table a metric, Octavo's own figures, what is missing and why."""
    parts = [_conditions(report)]
    parts += [f"### {metric.title}\n\n{_metric_table(report, metric)}" for metric in _METRICS]
    parts += [f"### Octavo alone\n\n{_own_figures(report)}"]
    if notes := _notes(report):
        parts.append("### Left out, failed or disturbed\n\n" + "\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts) + "\n"


def _measured(report: Report, workload: Workload, kinds: set[str]) -> list[Measurement]:
    """Whole measurements only: a run in which requests failed says nothing about speed."""
    found = [run.measurements.get(workload.name) for run in report.runs if run.kind in kinds]
    return [each for each in found if each is not None and each.num_failed == 0]


def _conditions(report: Report) -> str:
    machine = report.machine
    lines = [
        f"{report.date}, {machine['cpu']}, {machine['num_cpus']} cores, {machine['memory_gib']} GiB, "
        f"{machine['system']}, Python {machine['python']}, torch {machine['torch']}; "
        f"vector instructions: {' '.join(machine['vector_flags'])}. "
        f"{'Quiet before each turn' if report.waited_for_quiet else '**Not a quiet machine: a trial, no result**'}; "
        f"{'whole workloads' if report.scale == 1 else f'**workloads cut to {report.scale:g}: a trial, no result**'}; "
        f"{report.seconds:.0f} s in all.",
        "",
        *_table(
            ["server", "version", "process start to first token", "started as"],
            [[run.name, run.version, _seconds(run.first_token_s), f"`{run.settings}`"] for run in report.runs],
        ),
    ]
    return "\n".join(lines)


def _metric_table(report: Report, metric: _Metric) -> str:
    rows = []
    for name in report.workloads:
        workload = WORKLOADS[name]
        cells = []
        for run in report.runs:
            found = run.measurements.get(name)
            cells.append("–" if found is None else f"{metric.read(found):.1f}" + ("*" if _is_marked(found) else ""))
        against_peer, aim = ratio(report, workload, metric), metric.aim(workload)
        rows.append(
            [
                workload.title,
                *cells,
                "–" if against_peer is None else f"{against_peer:.2f}",
                "–" if aim is None else f"{metric.sign} {aim:g}",
            ]
        )
    head = ["workload", *(run.name for run in report.runs), "Octavo, better peer = 1", "aim"]
    return "\n".join(_table(head, rows))


def _own_figures(report: Report) -> str:
    starts = ", ".join(
        f"{what} {found if isinstance(found, str) else f'{found:.1f} s'}" for what, found in report.start_s.items()
    )
    lines = [f"Start of the default model to its first token: {starts or 'not measured'}.", ""]
    if isinstance(report.step_profile, str):
        return "\n".join([*lines, f"Step times: {report.step_profile}."])
    profile = report.step_profile
    lines += [
        f"Step times of the worker without client, router and scheduler ({profile['kernels']}, {profile['dtype']}, "
        f"decoding after {profile['figures'][0]['context']} tokens of context):",
        "",
        *_table(
            ["rows", "step, ms", "tokens/s"],
            [
                [str(each["num_rows"]), f"{each['step'] / 1e3:.2f}", f"{each['num_rows'] / each['step'] * 1e6:.0f}"]
                for each in profile["figures"]
            ],
        ),
    ]
    return "\n".join(lines)


def _notes(report: Report) -> list[str]:
    notes = [f"{name}: left out, {reason}" for name, reason in report.absent.items()]
    for run in report.runs:
        notes += [f"{run.name}, {where}: {reason}" for where, reason in run.failures.items()]
        for name, found in run.measurements.items():
            if found.num_failed:
                why = "; ".join(found.errors) or "without a word"
                notes.append(f"{run.name}, {name}: {found.num_failed} requests failed, in no ratio: {why}")
            if found.others_cores > DISTURBED_CORES:
                notes.append(f"{run.name}, {name}*: other processes kept {found.others_cores:.2f} cores busy")
    return notes


def _is_marked(found: Measurement) -> bool:
    return found.num_failed > 0 or found.others_cores > DISTURBED_CORES


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.1f} s"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table that reads well unrendered too."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return [line(head), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, rows)]
