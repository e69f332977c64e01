"""What one step produced: the data that the runner returns and the publisher turns into messages.

Plain numbers; no protobuf, no tensors on a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker_svc.rows import Int64Array

FloatArray = npt.NDArray[np.float32]
UInt64Array = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Address:
    """Where a sequence's tokens go, and under which name. `entry_position`: output tokens that it was admitted with."""

    router_id: int
    stream_key: int
    attempt: int
    entry_position: int = 0


@dataclass(frozen=True)
class Addresses:
    """The addresses of S rows, column by column: [S] each."""

    router_ids: UInt64Array
    stream_keys: UInt64Array
    attempts: Int64Array
    entry_positions: Int64Array

    @classmethod
    def of(cls, *addresses: Address) -> Addresses:
        """These, in order."""
        return cls(
            np.array([each.router_id for each in addresses], np.uint64),
            np.array([each.stream_key for each in addresses], np.uint64),
            np.array([each.attempt for each in addresses], np.int64),
            np.array([each.entry_position for each in addresses], np.int64),
        )

    def __getitem__(self, row: int) -> Address:
        columns = (self.router_ids, self.stream_keys, self.attempts, self.entry_positions)
        return Address(*(int(column[row]) for column in columns))

    def __setitem__(self, row: int, address: Address) -> None:
        self.router_ids[row], self.stream_keys[row] = address.router_id, address.stream_key
        self.attempts[row], self.entry_positions[row] = address.attempt, address.entry_position

    def take(self, rows: Int64Array | slice) -> Addresses:
        """Those of some rows, in their order."""
        return Addresses(self.router_ids[rows], self.stream_keys[rows], self.attempts[rows], self.entry_positions[rows])


@dataclass(frozen=True)
class TokenLogprobs:
    """Logprobs of N tokens, natural log: each token's own [N], and the likeliest ids with theirs [N, num_top]."""

    tokens: FloatArray
    top_ids: Int64Array
    top: FloatArray


@dataclass(frozen=True)
class PromptStretch:
    """Logprobs of prompt tokens at positions `start`, `start` + 1, ..., from one step."""

    plan_row: int
    address: Address
    start: int
    logprobs: TokenLogprobs

    @property
    def is_finite(self) -> bool:
        """False where the logits held NaN or infinity."""
        return bool(np.isfinite(self.logprobs.tokens).all())


@dataclass(frozen=True)
class SampledRows:
    """The S rows of a step that sampled or ended, in the plan's order; arrays are [S].

    A row whose token is an end or stop token, or meaningless since the row failed, has `listed` false: the token is
    not among the sequence's tokens. `output_positions` counts prior output tokens too.
    """

    plan_rows: Int64Array
    addresses: Addresses
    token_ids: Int64Array
    listed: npt.NDArray[np.bool_]
    finish_reasons: Int64Array
    output_positions: Int64Array
    # By index into these arrays, for rows that asked and whose token is listed.
    logprobs: Mapping[int, TokenLogprobs]


@dataclass(frozen=True)
class StepOutcome:
    """One executed plan."""

    step: int
    num_plan_rows: int
    # Disjoint groups of rows: those that sampled, those that failed before they could.
    sampled: tuple[SampledRows, ...]
    prompt_stretches: tuple[PromptStretch, ...]
    # Wall time of the plan's block copies; 0 where they had not ended when the step was done.
    copy_ns: int = 0
