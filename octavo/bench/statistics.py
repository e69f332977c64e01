"""From what happened to each request to what a run was like: percentiles, throughput, goodput, errors by kind.

Pure arithmetic. Latencies are of requests that were answered completely; percentiles are nearest-rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from octavo.bench.processes import ServerUse
from octavo.bench.records import Record
from octavo.bench.slo import Slo
from octavo.percentiles import percentile


@dataclass(frozen=True)
class Latency:
    """A latency over a run's requests, in milliseconds; 0 where nothing was measured."""

    mean: float
    p50: float
    p90: float
    p99: float
    longest: float

    @classmethod
    def of(cls, seconds: Iterable[float | None]) -> Latency:
        """Of those that are not None."""
        values = sorted(1e3 * value for value in seconds if value is not None)
        if not values:
            return cls(0.0, 0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = (percentile(values, share) for share in (0.50, 0.90, 0.99))
        return cls(sum(values) / len(values), p50, p90, p99, values[-1])


@dataclass(frozen=True)
class Summary:
    """One run. `seconds` is from when the first request was due to the last end."""

    seconds: float
    num_requests: int
    num_complete: int
    errors: dict[str, int]
    """Failed requests by kind."""
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    """Prompt tokens that servers said they had cached."""
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    slo_share: float | None
    """Of all requests, that kept the limits; None without any."""
    goodput_per_s: float | None
    """Requests a second that kept the limits."""
    ttft_ms: Latency
    tpot_ms: Latency
    itl_ms: Latency
    e2e_ms: Latency
    latest_send_ms: float
    """The longest that the client was late in sending."""
    client_cores: float
    """Cores that the client itself kept busy. Near 1, it and not the server may be what is measured."""
    server: ServerUse | None
    """What the server's processes used, where they are on this machine."""
    error_example: str = ""

    def to_json(self) -> dict[str, Any]:
        """As plain data; `from_json` is its inverse."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in found.items():
            if isinstance(value, Latency | ServerUse):
                found[name] = {field.name: getattr(value, field.name) for field in fields(value)}
        return found

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Summary:
        """Raises TypeError or KeyError for what is no summary."""
        found = dict(data)
        for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
            found[name] = Latency(**found[name])
        server = found["server"]
        found["server"] = None if server is None else ServerUse(**{**server, "pids": tuple(server["pids"])})
        return cls(**found)


def summarize(
    records: Sequence[Record], slo: Slo | None, client_cores: float = 0.0, server: ServerUse | None = None
) -> Summary:
    """A run's summary. Raises ValueError where nothing was asked."""
    if not records:
        raise ValueError("no request was sent, so there is nothing to summarize")
    complete = [record for record in records if record.answer is not None]
    seconds = max(1e-9, max(record.ended_s for record in records) - min(record.due_s for record in records))
    num_output = sum(record.num_output_tokens for record in complete)
    num_prompt = sum((record.answer.num_prompt_tokens or 0) for record in complete if record.answer)
    num_good = None if slo is None else sum(map(slo.is_met, records))
    failed = [record for record in records if record.error_kind is not None]
    return Summary(
        seconds=seconds,
        num_requests=len(records),
        num_complete=len(complete),
        errors=dict(Counter(record.error_kind for record in failed if record.error_kind).most_common()),
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        num_cached_tokens=sum((record.answer.num_cached_tokens or 0) for record in complete if record.answer),
        requests_per_s=len(complete) / seconds,
        output_tokens_per_s=num_output / seconds,
        total_tokens_per_s=(num_prompt + num_output) / seconds,
        slo_share=None if num_good is None else num_good / len(records),
        goodput_per_s=None if num_good is None else num_good / seconds,
        ttft_ms=Latency.of(record.ttft_s for record in complete),
        tpot_ms=Latency.of(record.tpot_s for record in complete),
        itl_ms=Latency.of(gap for record in complete for gap in record.gaps_s),
        e2e_ms=Latency.of(record.e2e_s for record in complete),
        latest_send_ms=1e3 * max(record.sent_s - record.due_s for record in records),
        client_cores=client_cores,
        server=server,
        error_example=failed[0].error_message if failed else "",
    )
