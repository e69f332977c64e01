"""From a step's outcome to the messages that leave the worker: TokenBatch for routers, StepResult for the scheduler.

Pure: knows outcomes and protobuf, no sockets. One TokenBatch a step and router carries all its tokens; prompt logprobs,
which can be large, go before it in messages of bounded size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from octavo.internal.v1 import types_pb2, worker_pb2
from worker_svc.outcome import PromptStretch, SampledRows, StepOutcome, TokenLogprobs, UInt64Array
from worker_svc.rows import Int64Array

# Numbers of prompt logprobs in one message: about 300 KiB.
MAX_PROMPT_NUMBERS = 32_768

# A row that ended so has a token id that means nothing.
_FAILURES = (types_pb2.FINISH_REASON_NUMERIC_ERROR, types_pb2.FINISH_REASON_GRAMMAR_ERROR)


@dataclass
class OutgoingBatch:
    """One message to one router, and the plan's rows whose data it holds."""

    message: worker_pb2.TokenBatch = field(default_factory=worker_pb2.TokenBatch)
    plan_rows: list[int] = field(default_factory=list)


def token_batches(outcome: StepOutcome) -> dict[int, list[OutgoingBatch]]:
    """The messages for each router, in sending order."""
    batches: dict[int, list[OutgoingBatch]] = defaultdict(list)
    num_numbers: dict[int, int] = defaultdict(lambda: MAX_PROMPT_NUMBERS)
    for stretch in outcome.prompt_stretches:
        router_id = stretch.address.router_id
        for entry in _prompt_entries(stretch):
            size = _num_prompt_numbers(entry)
            if num_numbers[router_id] + size > MAX_PROMPT_NUMBERS:
                batches[router_id].append(OutgoingBatch())
                num_numbers[router_id] = 0
            num_numbers[router_id] += size
            batches[router_id][-1].message.prompt_logprobs.append(entry)
            batches[router_id][-1].plan_rows.append(stretch.plan_row)
    for group in outcome.sampled:
        _add_sampled(batches, group)
    return batches


def _add_sampled(batches: dict[int, list[OutgoingBatch]], rows: SampledRows) -> None:
    """Column by column: protobuf takes a list far faster than its elements one at a time."""
    is_meaningless = np.isin(rows.finish_reasons, _FAILURES)
    final_token_ids = np.where(rows.listed | is_meaningless, 0, rows.token_ids)
    for router_id, chosen in _by_router(rows.addresses.router_ids):
        if not batches[router_id]:
            batches[router_id].append(OutgoingBatch())
        batch = batches[router_id][-1]
        batch.plan_rows.extend(rows.plan_rows[chosen].tolist())
        message = batch.message
        num_before = len(message.stream_keys)
        addresses, listed = rows.addresses.take(chosen), rows.listed[chosen]
        message.stream_keys.extend(addresses.stream_keys.tolist())
        message.attempts.extend(addresses.attempts.tolist())
        message.positions.extend(rows.output_positions[chosen].tolist())
        message.entry_positions.extend(addresses.entry_positions.tolist())
        message.num_tokens.extend(listed.astype(np.int64).tolist())
        message.token_ids.extend(rows.token_ids[chosen][listed].tolist())
        message.finish_reasons.extend(rows.finish_reasons[chosen].tolist())
        message.final_token_ids.extend(final_token_ids[chosen].tolist())
        if rows.logprobs:
            indexes = np.arange(len(rows.listed))[chosen].tolist()
            message.logprobs.extend(
                _output_logprobs(num_before + place, rows.logprobs[index])
                for place, index in enumerate(indexes)
                if index in rows.logprobs
            )


def _by_router(router_ids: UInt64Array) -> Iterator[tuple[int, Int64Array | slice]]:
    """Each router and where its rows are, in the order of their first rows; nearly always there is one."""
    distinct = dict.fromkeys(router_ids.tolist())
    for router_id in distinct:
        yield router_id, slice(None) if len(distinct) == 1 else np.flatnonzero(router_ids == router_id)


def _output_logprobs(index: int, logprobs: TokenLogprobs) -> worker_pb2.OutputLogprobs:
    return worker_pb2.OutputLogprobs(
        index=index,
        sampled=logprobs.tokens.tolist(),
        num_top=logprobs.top.shape[1],
        top_token_ids=logprobs.top_ids.ravel().tolist(),
        top=logprobs.top.ravel().tolist(),
    )


def _prompt_entries(stretch: PromptStretch) -> Iterator[worker_pb2.PromptLogprobs]:
    """The stretch in pieces, each small enough for one message."""
    logprobs = stretch.logprobs
    num_top = logprobs.top.shape[1]
    tokens_each = max(1, MAX_PROMPT_NUMBERS // (1 + 2 * num_top))
    for first in range(0, len(logprobs.tokens), tokens_each):
        piece = slice(first, first + tokens_each)
        yield worker_pb2.PromptLogprobs(
            stream_key=stretch.address.stream_key,
            attempt=stretch.address.attempt,
            start=stretch.start + first,
            tokens=logprobs.tokens[piece].tolist(),
            num_top=num_top,
            top_token_ids=logprobs.top_ids[piece].ravel().tolist(),
            top=logprobs.top[piece].ravel().tolist(),
        )


def _num_prompt_numbers(entry: worker_pb2.PromptLogprobs) -> int:
    return len(entry.tokens) + len(entry.top_token_ids) + len(entry.top)


def step_result(
    outcome: StepOutcome, incarnation: int, undelivered_rows: Iterable[int], duration_ns: int
) -> worker_pb2.StepResult:
    """The plan's rows in its order: what each sampled, and why it ended in this step."""
    num_rows = outcome.num_plan_rows
    num_sampled, token_ids, reasons = (np.zeros(num_rows, np.int64) for _ in range(3))
    for group in outcome.sampled:
        num_sampled[group.plan_rows] = group.listed
        token_ids[group.plan_rows] = group.token_ids
        reasons[group.plan_rows] = group.finish_reasons
    return worker_pb2.StepResult(
        incarnation=incarnation,
        step=outcome.step,
        num_sampled=num_sampled.tolist(),
        token_ids=token_ids[num_sampled > 0].tolist(),
        finish_reasons=reasons.tolist(),  # type: ignore[arg-type]
        undelivered_rows=sorted(undelivered_rows),
        duration_ns=duration_ns,
        copy_ns=outcome.copy_ns,
    )
