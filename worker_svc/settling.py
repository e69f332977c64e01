"""What a step's sampled tokens come to, once they are known: rows that end, tokens that are listed, logprobs.

Knows rows, sampling parameters and results as they come from the device; launches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.api import Samples, SamplingBatch
from octavo.internal.v1 import types_pb2
from worker_svc.device.staging import Arrived, Downloads, Fetched
from worker_svc.outcome import Addresses, PromptStretch, SampledRows, StepOutcome, TokenLogprobs
from worker_svc.rows import Int64Array, PlanError, RowState, RowTable
from worker_svc.sampling import SamplingTable


@dataclass(frozen=True)
class Sampling:
    """The rows of a step that sample, and their results on the way. Arrays are [S]."""

    plan_rows: Int64Array
    slots: Int64Array
    # Tokens of each row, the sampled one included.
    num_tokens: Int64Array
    # Rows that end in an error, whatever they sample.
    broken: npt.NDArray[np.bool_]
    # Of the rows that asked for logprobs, by index: how many alternatives.
    num_tops: dict[int, int]
    fetched: Fetched | Arrived


@dataclass(frozen=True)
class LaunchedStep:
    """A step whose results are not known yet."""

    step: int
    num_plan_rows: int
    sampling: Sampling | None
    # Rows of inner chunks that end for logits that are not finite: their places in the plan, and their slots.
    failing: tuple[Int64Array, Int64Array]
    prompt_stretches: tuple[PromptStretch, ...]

    @property
    def slots(self) -> Int64Array:
        """Of the rows that it may end."""
        return self.failing[1] if self.sampling is None else np.concatenate([self.sampling.slots, self.failing[1]])


class Settler:
    """Settles steps in the order in which they were launched. Used by the step thread."""

    def __init__(self, rows: RowTable, sampling: SamplingTable, addresses: Addresses, downloads: Downloads) -> None:
        """`addresses` are by slot."""
        self._rows, self._table, self._addresses = rows, sampling, addresses
        self._downloads = downloads

    def fetch(self, samples: Samples, faults: Sequence[object]) -> Fetched | Arrived:
        """Launches the copy of a step's results to the host, all of them in one; `faults` are tensors [rows]."""
        logprobs = samples.logprobs
        given = () if logprobs is None else (logprobs.token_logprobs, logprobs.top_ids, logprobs.top_logprobs)
        return self._downloads.fetch([samples.token_ids, samples.finite, *given, *faults])  # type: ignore[list-item]

    def settle(self, launched: LaunchedStep) -> StepOutcome:
        """Waits for the results. Raises PlanError where the kernels found a row that disagrees with its blocks."""
        groups = (self._sampled(launched.sampling), self._failed(*launched.failing))
        return StepOutcome(
            launched.step,
            launched.num_plan_rows,
            tuple(group for group in groups if group is not None),
            tuple(stretch for stretch in launched.prompt_stretches if stretch.is_finite),
        )

    def _sampled(self, sampling: Sampling | None) -> SampledRows | None:
        if sampling is None:
            return None
        token_ids, finite, *rest = sampling.fetched.read()
        num_logprobs = 3 if sampling.num_tops else 0  # as `fetch` was given them
        _check_faults(rest[num_logprobs:])
        # A row that ended by the step before, of which its launch did not know, has sampled for nothing.
        going = np.flatnonzero(self._rows.states[sampling.slots] == RowState.LIVE)
        slots, num_tokens = sampling.slots[going], sampling.num_tokens[going]
        if not len(slots):
            return None
        chosen, is_finite = token_ids[going].astype(np.int64), finite[going].astype(bool) & ~sampling.broken[going]
        reasons = self._table.finish_reasons(slots, chosen, is_finite, num_tokens)
        listed = (reasons == 0) | (reasons == types_pb2.FINISH_REASON_LENGTH)
        self._rows.settle_tokens(slots[listed], chosen[listed])
        for slot in slots[reasons != 0].tolist():
            self._rows.end(slot)
        return SampledRows(
            plan_rows=sampling.plan_rows[going],
            addresses=self._addresses.take(slots),
            token_ids=chosen,
            listed=listed,
            finish_reasons=reasons,
            output_positions=num_tokens - 1 - self._rows.num_prompt_tokens[slots],
            logprobs=_token_logprobs(rest[:num_logprobs], sampling.num_tops, going, listed),
        )

    def _failed(self, plan_rows: Int64Array, slots: Int64Array) -> SampledRows | None:
        """Ends rows of inner chunks whose prompt logits were not finite."""
        if not len(slots):
            return None
        for slot in slots.tolist():
            self._rows.end(slot)
        return SampledRows(
            plan_rows=plan_rows,
            addresses=self._addresses.take(slots),
            token_ids=np.zeros(len(slots), np.int64),
            listed=np.zeros(len(slots), bool),
            finish_reasons=np.full(len(slots), types_pb2.FINISH_REASON_NUMERIC_ERROR, np.int64),
            output_positions=self._rows.num_tokens[slots] - self._rows.num_prompt_tokens[slots],
            logprobs={},
        )


def requested_tops(samples: Samples, batch: SamplingBatch, table: SamplingTable, slots: Int64Array) -> dict[int, int]:
    """Of the rows whose logprobs there are, by index into the batch: how many alternatives they asked for."""
    if samples.logprobs is None:
        return {}
    rows: list[int] = batch.logprob_rows.tolist()
    return {row: min(table[int(slots[row])].num_logprobs or 0, batch.num_top) for row in rows}


def _check_faults(faults: Sequence[npt.NDArray[np.generic]]) -> None:
    for rows in faults:
        if rows.any():
            row = int(np.flatnonzero(rows)[0])
            raise PlanError(
                f"row {row} of the step's batch disagrees with its blocks: fault {rows[row]} of the kernels"
            )


def _token_logprobs(
    found: Sequence[npt.NDArray[np.generic]],
    num_tops: dict[int, int],
    going: Int64Array,
    listed: npt.NDArray[np.bool_],
) -> dict[int, TokenLogprobs]:
    """By index into the rows that go on, for those that asked and whose token is listed."""
    places = {int(row): place for place, row in enumerate(going.tolist()) if listed[place]}
    return {
        places[row]: TokenLogprobs(
            tokens=found[0][index : index + 1].astype(np.float32),
            top_ids=found[1][index : index + 1, :num_top].astype(np.int64),
            top=found[2][index : index + 1, :num_top].astype(np.float32),
        )
        for index, (row, num_top) in enumerate(num_tops.items())
        if row in places
    }
