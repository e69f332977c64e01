"""When things happened to sequences, and what that means for those who wait: throughput, TTFT, TPOT.

Pure arithmetic over the core's events and times in nanoseconds. TTFT is from submission to the first token; TPOT the
mean time between two tokens of a sequence after its first, over sequences with at least two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.percentiles import percentile
from scheduler_svc.core.types import Ended, Event, Finished, Preempted, Scheduled


@dataclass
class SequenceTimes:
    """When things happened to one sequence."""

    submitted_ns: int
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    ended_ns: int | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    """Sampled ones; those of earlier attempts do not count."""
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0
    was_refused: bool = False
    was_cut: bool = False
    """It was cancelled, lost or late."""
    tenant: str = ""

    def note_token(self, now_ns: int) -> None:
        """One more token is there."""
        self.num_output_tokens += 1
        self.last_token_ns = now_ns
        if self.first_token_ns is None:
            self.first_token_ns = now_ns

    def note_event(self, event: Event, now_ns: int) -> None:
        """What the core said of the sequence."""
        match event:
            case Preempted():
                self.num_preemptions += 1
            case Scheduled():
                if self.first_token_ns is None:
                    self.num_cached_tokens = event.cached_tokens
                self.num_recomputed_tokens += event.recomputed_tokens
            case Finished() | Ended():
                self.ended_ns = now_ns
                self.was_cut = isinstance(event, Ended)

    @property
    def ttft_ns(self) -> int | None:
        """Time to the first token; None before it."""
        return None if self.first_token_ns is None else self.first_token_ns - self.submitted_ns

    @property
    def tpot_ns(self) -> float | None:
        """Time between two tokens; None before there are two."""
        if self.first_token_ns is None or self.last_token_ns is None or self.num_output_tokens < 2:
            return None
        return (self.last_token_ns - self.first_token_ns) / (self.num_output_tokens - 1)


@dataclass(frozen=True)
class Summary:
    """What a run was like. Times are milliseconds, 0 where nothing was measured."""

    num_sequences: int
    num_complete: int
    num_cut: int
    num_refused: int
    seconds: float
    output_tokens_per_s: float
    requests_per_s: float
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    ttft_p99_ms: float
    tpot_mean_ms: float
    tpot_p50_ms: float
    tpot_p95_ms: float
    num_preemptions: int
    num_recomputed_tokens: int
    cached_share: float
    """Of prompt tokens, found in the prefix cache."""


def summarize(times: Iterable[SequenceTimes]) -> Summary:
    """A run's summary, from the first submission to the last end."""
    found = list(times)
    begin = min((each.submitted_ns for each in found), default=0)
    end = max((each.ended_ns or each.last_token_ns or each.submitted_ns for each in found), default=0)
    seconds = max(1, end - begin) / 1e9
    complete = [each for each in found if each.ended_ns is not None and not each.was_cut and not each.was_refused]
    ttft = sorted(each.ttft_ns / 1e6 for each in found if each.ttft_ns is not None)
    tpot = sorted(each.tpot_ns / 1e6 for each in found if each.tpot_ns is not None)
    started = [each for each in found if each.first_token_ns is not None]
    return Summary(
        num_sequences=len(found),
        num_complete=len(complete),
        num_cut=sum(each.was_cut for each in found),
        num_refused=sum(each.was_refused for each in found),
        seconds=seconds,
        output_tokens_per_s=sum(each.num_output_tokens for each in found) / seconds,
        requests_per_s=len(complete) / seconds,
        ttft_mean_ms=_mean(ttft),
        ttft_p50_ms=percentile(ttft, 0.50),
        ttft_p95_ms=percentile(ttft, 0.95),
        ttft_p99_ms=percentile(ttft, 0.99),
        tpot_mean_ms=_mean(tpot),
        tpot_p50_ms=percentile(tpot, 0.50),
        tpot_p95_ms=percentile(tpot, 0.95),
        num_preemptions=sum(each.num_preemptions for each in found),
        num_recomputed_tokens=sum(each.num_recomputed_tokens for each in found),
        cached_share=sum(each.num_cached_tokens for each in started)
        / max(1, sum(each.num_prompt_tokens for each in started)),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


_ROWS: tuple[tuple[str, str, str], ...] = (
    ("sequences", "num_sequences", "d"),
    ("  complete", "num_complete", "d"),
    ("  cancelled, lost or late", "num_cut", "d"),
    ("  refused", "num_refused", "d"),
    ("seconds", "seconds", ".1f"),
    ("requests a second", "requests_per_s", ".2f"),
    ("output tokens a second", "output_tokens_per_s", ".1f"),
    ("TTFT mean, ms", "ttft_mean_ms", ".1f"),
    ("TTFT p50, ms", "ttft_p50_ms", ".1f"),
    ("TTFT p95, ms", "ttft_p95_ms", ".1f"),
    ("TTFT p99, ms", "ttft_p99_ms", ".1f"),
    ("TPOT mean, ms", "tpot_mean_ms", ".2f"),
    ("TPOT p50, ms", "tpot_p50_ms", ".2f"),
    ("TPOT p95, ms", "tpot_p95_ms", ".2f"),
    ("preemptions", "num_preemptions", "d"),
    ("recomputed tokens", "num_recomputed_tokens", "d"),
    ("prompt tokens cached", "cached_share", ".1%"),
)


def table(columns: Sequence[tuple[str, Summary]]) -> list[str]:
    """Summaries side by side, one line a number."""
    widths = [max(12, len(name) + 2) for name, _ in columns]
    head = f"{'':26}" + "".join(f"{name:>{width}}" for (name, _), width in zip(columns, widths, strict=True))
    lines = [head]
    for label, name, form in _ROWS:
        cells = (f"{getattr(summary, name):{form}}" for _, summary in columns)
        lines.append(f"{label:<26}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))
    return lines
