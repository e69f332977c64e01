"""What a step costs on a replica that is only described: a linear model of time and memory.

Shared by the simulated worker, which waits so long, and by `octavo plan`, which computes in virtual time. Knows numbers
alone. A step of T prompt tokens and R decoding rows whose attention reads K cached tokens takes

    step_ms + T / prefill_tokens_per_s + R * row_us + K * kv_token_ns,       and copy_us for each block copied

which is how real steps behave away from their knees: weights are read once (step_ms), prompts are bound by arithmetic,
decoding rows by memory.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class CostModel:
    """A replica's speed and the size of its KV cache. Defaults are about an 8B model on one large GPU."""

    prefill_tokens_per_s: float = 20_000.0
    """Prompt tokens computed in a second."""
    step_ms: float = 8.0
    """A step's time without a token."""
    row_us: float = 30.0
    """What one decoding row adds to it, in microseconds."""
    kv_token_ns: float = 50.0
    """What one cached token of a decoding row adds to it, in nanoseconds."""
    copy_us: float = 100.0
    """What copying one block between device and host adds to it, in microseconds."""
    kv_bytes: float = 131_072.0
    """Bytes of KV for one token."""
    output_tokens: float = 256.0
    """Output tokens after which answers end, on average, unless the request ends them sooner."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_positive = field.name in ("prefill_tokens_per_s", "kv_bytes", "output_tokens")
            if not 0 <= value < float("inf") or (is_positive and value == 0):
                limit = "a finite number above 0" if is_positive else "a finite number, at least 0"
                raise ValueError(f"{field.name} is {value:g}; it must be {limit}")

    def step_ns(self, num_prefill_tokens: int, num_decode_rows: int, num_kv_tokens: int, num_copies: int = 0) -> int:
        """Time of one step in nanoseconds. `num_kv_tokens` are those cached for its decoding rows."""
        rows_ns = num_decode_rows * self.row_us * 1e3 + num_kv_tokens * self.kv_token_ns
        return int(self.step_ms * 1e6 + num_prefill_tokens * 1e9 / self.prefill_tokens_per_s + rows_ns) + self.copy_ns(
            num_copies
        )

    def copy_ns(self, num_copies: int) -> int:
        """Time of a step's copies between the tiers in nanoseconds."""
        return int(num_copies * self.copy_us * 1e3)

    def num_blocks(self, num_bytes: int, block_size: int) -> int:
        """KV blocks that so much memory holds."""
        return int(num_bytes // (self.kv_bytes * block_size))


def parse_costs(text: str) -> CostModel:
    """A cost model from `name=number,...`; what is left out has its default. Raises ValueError naming a bad part."""
    names = [field.name for field in dataclasses.fields(CostModel)]
    values: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = part.partition("=")
        if name.strip() not in names:
            raise ValueError(f"{name.strip()!r} is none of {', '.join(names)}")
        try:
            values[name.strip()] = float(number)
        except ValueError:
            raise ValueError(f"{name.strip()} is {number!r}; it must be a number") from None
    return CostModel(**values)
