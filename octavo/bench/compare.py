"""Compares two benchmarks of the same loads: what got better or worse, by how much, and whether that is too much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.bench.report import Point, Report


@dataclass(frozen=True)
class Metric:
    """What is compared. `sign` is 1 where more is better and -1 where less is."""

    key: str
    label: str
    sign: int


METRICS: tuple[Metric, ...] = (
    Metric("output_tokens_per_s", "output tokens/s", 1),
    Metric("goodput_per_s", "goodput, requests/s", 1),
    Metric("ttft_ms.p50", "TTFT p50, ms", -1),
    Metric("ttft_ms.p99", "TTFT p99, ms", -1),
    Metric("tpot_ms.p50", "TPOT p50, ms", -1),
    Metric("tpot_ms.p99", "TPOT p99, ms", -1),
    Metric("e2e_ms.p50", "e2e p50, ms", -1),
)


@dataclass(frozen=True)
class Change:
    """One metric at one load, before and after: means over the repeats."""

    load: str
    metric: Metric
    before: float
    after: float
    ranges_overlap: bool
    """Some repeat after is no worse than some repeat before: with several repeats, it may be chance."""

    @property
    def worse_by(self) -> float:
        """The share by which it got worse; negative where it got better."""
        if self.before == 0:
            return 0.0
        return self.metric.sign * (self.before - self.after) / self.before


def compare(before: Report, after: Report) -> list[Change]:
    """Every metric that both have, at every load that both have. Raises ValueError where no load is in both."""
    points = {str(point.load): point for point in after.points}
    found = [
        change
        for point in before.points
        if (other := points.get(str(point.load))) is not None
        for change in _changes(point, other)
    ]
    if not found:
        loads = " and ".join(", ".join(str(point.load) for point in report.points) for report in (before, after))
        raise ValueError(f"the two have no load in common: {loads}")
    return found


def too_bad(changes: Sequence[Change], most_worse: float) -> list[Change]:
    """Those that got worse by more than the given share."""
    return [change for change in changes if change.worse_by > most_worse]


def parse_share(text: str) -> float:
    """0.05 from `5%` or `0.05`. Raises ValueError."""
    value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= value < 100:
        raise ValueError(f"{text!r} is no share such as 5%")
    return value


def lines(changes: Sequence[Change], most_worse: float | None) -> list[str]:
    """The comparison as a table; `~` marks what may be chance."""
    found = [f"{'load':<14}{'':24}{'before':>12}{'after':>12}{'change':>10}"]
    for change in changes:
        percent = 0.0 if change.before == 0 else (change.after - change.before) / change.before
        note = "" if most_worse is None or change.worse_by <= most_worse else "  worse"
        chance = " ~" if change.ranges_overlap else ""
        found.append(
            f"{change.load:<14}{change.metric.label:<24}{change.before:>12.2f}{change.after:>12.2f}{percent:>+10.1%}"
            f"{note}{chance}"
        )
    return found


def unequal(before: Report, after: Report) -> list[str]:
    """In what the two benchmarks differ beside their figures."""
    found = []
    for name in ("target", "workload", "machine", "slo", "options"):
        was, now = getattr(before, name), getattr(after, name)
        if was != now:
            shown = [", ".join(value) if isinstance(value, tuple) else value for value in (was, now)]
            found.append(f"{name} differs: {shown[0] or 'none'} | {shown[1] or 'none'}")
    only = {str(point.load) for point in before.points} ^ {str(point.load) for point in after.points}
    return [*found, *(f"{load} is in one of them alone" for load in sorted(only))]


def _changes(before: Point, after: Point) -> list[Change]:
    found = []
    for metric in METRICS:
        old, new = before.values(metric.key), after.values(metric.key)
        if old and new:
            best_new, worst_old = max(metric.sign * value for value in new), min(metric.sign * value for value in old)
            overlap = len(old) > 1 and len(new) > 1 and best_new >= worst_old
            found.append(Change(str(before.load), metric, sum(old) / len(old), sum(new) / len(new), overlap))
    return found
