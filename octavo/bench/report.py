"""A benchmark's result: its points as a table for people and as JSON for `octavo bench compare` and other programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from octavo.bench.load import Load
from octavo.bench.statistics import Summary

FORMAT = 1
"""Of the JSON; a reader refuses another one."""

BUSY_CLIENT_CORES = 0.8
LATE_SEND_MS = 20.0


@dataclass(frozen=True)
class Point:
    """One load and its runs, at least one."""

    load: Load
    runs: tuple[Summary, ...]

    def values(self, key: str) -> list[float]:
        """A metric's value in each run that has one; `key` is a path such as `ttft_ms.p50`."""
        found = [_part(run, key) for run in self.runs]
        return [float(value) for value in found if isinstance(value, int | float)]

    def mean(self, key: str) -> float | None:
        """Over the runs; None where none has the metric."""
        values = self.values(key)
        return sum(values) / len(values) if values else None


@dataclass(frozen=True)
class Limit:
    """The hardest load that kept the SLO, None where not even the least one did."""

    kind: Literal["concurrency", "rate"]
    value: float | None


@dataclass(frozen=True)
class Report:
    """Everything that a benchmark found, and what it was of."""

    date: str
    version: str
    """Of Octavo, whose client measured."""
    target: str
    workload: str
    options: tuple[str, ...]
    """Those that differ from their defaults."""
    machine: str
    """Where the client ran."""
    slo: str
    points: tuple[Point, ...]
    limit: Limit | None = None

    def to_json(self) -> str:
        """The file's content."""
        data: dict[str, Any] = {"format": FORMAT}
        data |= {name: getattr(self, name) for name in ("date", "version", "target", "workload", "machine", "slo")}
        data["options"] = list(self.options)
        data["points"] = [
            {
                "load": {"kind": point.load.kind, "value": point.load.value},
                "runs": [run.to_json() for run in point.runs],
            }
            for point in self.points
        ]
        data["limit"] = None if self.limit is None else {"kind": self.limit.kind, "value": self.limit.value}
        return json.dumps(data, indent=1) + "\n"


def read_report(path: Path) -> Report:
    """A report from its file. Raises ValueError, naming the file, for what is none; OSError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']!r}, this version reads {FORMAT}")
        points = tuple(
            Point(Load(point["load"]["kind"], point["load"]["value"]), tuple(map(Summary.from_json, point["runs"])))
            for point in data["points"]
        )
        names = ("date", "version", "target", "workload", "machine", "slo")
        limit = None if data["limit"] is None else Limit(**data["limit"])
        return Report(
            **{name: data[name] for name in names}, options=tuple(data["options"]), points=points, limit=limit
        )
    except (ValueError, KeyError, TypeError) as error:
        cause = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path} is no result of octavo bench: {cause}") from None


_LATENCIES = (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms"), ("e2e", "e2e_ms"))
_ROWS: tuple[tuple[str, str, str], ...] = (
    ("requests", "num_requests", ".0f"),
    ("  complete", "num_complete", ".0f"),
    ("seconds", "seconds", ".1f"),
    ("requests/s", "requests_per_s", ".2f"),
    ("output tokens/s", "output_tokens_per_s", ".1f"),
    ("all tokens/s", "total_tokens_per_s", ".1f"),
    ("goodput, requests/s", "goodput_per_s", ".2f"),
    ("  within the SLO", "slo_share", ".1%"),
    *(
        (f"{name} {share}, ms", f"{key}.{share}", ".1f")
        for name, key in _LATENCIES
        for share in ("mean", "p50", "p90", "p99")
    ),
    ("client sends late, ms", "latest_send_ms", ".1f"),
    ("client CPU, of a core", "client_cores", ".0%"),
    ("server memory, MiB", "server.peak_memory_mib", ".0f"),
    ("server cores", "server.cores", ".2f"),
)


def table(points: Sequence[Point]) -> list[str]:
    """The points side by side, one line a number: the mean over repeats, and their range where there are several."""
    columns = [[str(point.load), *(_cell(point, key, form) for _, key, form in _ROWS)] for point in points]
    names = ["", *(label for label, _, _ in _ROWS)]
    lines = []
    for index, name in enumerate(names):
        cells = [column[index] for column in columns]
        if any(cells):
            widths = (max(12, *map(len, column)) + 2 for column in columns)
            lines.append(f"{name:<24}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))
    return [*lines, *_errors(points), *_warnings(points)]


def _part(whole: Any, path: str) -> Any:
    """An attribute of an attribute; None where one is missing or None."""
    for name in path.split("."):
        whole = getattr(whole, name, None)
    return whole


def _cell(point: Point, key: str, form: str) -> str:
    values = point.values(key)
    if not values:
        return ""
    mean = f"{sum(values) / len(values):{form}}"
    least, most = f"{min(values):{form}}", f"{max(values):{form}}"
    return mean if least == most else f"{mean} ({least}–{most})"


def _errors(points: Sequence[Point]) -> list[str]:
    lines = []
    for point in points:
        kinds: dict[str, int] = {}
        for run in point.runs:
            for kind, count in run.errors.items():
                kinds[kind] = kinds.get(kind, 0) + count
        if kinds:
            counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            example = next(run.error_example for run in point.runs if run.error_example)
            lines.append(f"failed at {point.load}: {counted}; the first: {example}")
    return lines


def _warnings(points: Sequence[Point]) -> list[str]:
    """Where it may be the client that is measured."""
    lines = []
    for point in points:
        cores, late_ms = max(point.values("client_cores")), max(point.values("latest_send_ms"))
        if cores > BUSY_CLIENT_CORES or late_ms > LATE_SEND_MS:
            lines.append(
                f"at {point.load} the client kept {cores:.0%} of a core busy and sent up to {late_ms:.0f} ms late: it "
                "may be the bottleneck; run it on another machine, or several with a part of the load each"
            )
    return lines
