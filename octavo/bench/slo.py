"""What is good enough: limits of latency that a request is to keep, written as `ttft=500,tpot=50,itl=200,e2e=10000`."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.bench.records import Record

_NAMES = ("ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True)
class Slo:
    """Most milliseconds of each, None for no limit. `itl_ms` bounds the longest gap between two arrivals."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Raises ValueError naming the word that is not understood."""
        limits: dict[str, float] = {}
        for word in text.split(","):
            name, _, value = word.strip().partition("=")
            try:
                limit = float(value)
            except ValueError:
                limit = 0.0
            if name not in _NAMES or not 0 < limit < 1e9:
                raise ValueError(f"{word!r} is no limit such as ttft=500; the names are {', '.join(_NAMES)}")
            limits[f"{name}_ms"] = limit
        return cls(**limits)

    def __str__(self) -> str:
        limits = ((name, getattr(self, f"{name}_ms")) for name in _NAMES)
        return ", ".join(f"{name.upper()} {limit:g} ms" for name, limit in limits if limit is not None)

    def is_met(self, record: Record) -> bool:
        """Whether the request was answered within every limit. One without a second token keeps TPOT and ITL."""
        if not record.is_complete:
            return False
        values = (
            (self.ttft_ms, record.ttft_s),
            (self.tpot_ms, record.tpot_s or 0.0),
            (self.itl_ms, max(record.gaps_s, default=0.0)),
            (self.e2e_ms, record.e2e_s),
        )
        return all(limit is None or (value is not None and 1e3 * value <= limit) for limit, value in values)
