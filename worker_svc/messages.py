"""From a step's outcome to the messages that leave the worker: TokenBatch for routers, StepResult for the scheduler.

Pure: knows outcomes and protobuf, no sockets. One TokenBatch a step and router carries all its tokens; prompt logprobs,
which can be large, go before it in messages of bounded size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from octavo.internal.v1 import types_pb2, worker_pb2
from worker_svc.outcome import PromptStretch, SampledRows, StepOutcome, TokenLogprobs

# Numbers of prompt logprobs in one message: about 300 KiB.
MAX_PROMPT_NUMBERS = 32_768


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
    plan_rows, token_ids, reasons = rows.plan_rows.tolist(), rows.token_ids.tolist(), rows.finish_reasons.tolist()
    listed, positions = rows.listed.tolist(), rows.output_positions.tolist()
    indexes_of: dict[int, list[int]] = defaultdict(list)
    for index, address in enumerate(rows.addresses):
        indexes_of[address.router_id].append(index)
    for router_id, indexes in indexes_of.items():
        if not batches[router_id]:
            batches[router_id].append(OutgoingBatch())
        batch = batches[router_id][-1]
        batch.plan_rows.extend([plan_rows[i] for i in indexes])
        message = batch.message
        num_before = len(message.stream_keys)
        message.stream_keys.extend([rows.addresses[i].stream_key for i in indexes])
        message.attempts.extend([rows.addresses[i].attempt for i in indexes])
        message.positions.extend([positions[i] for i in indexes])
        message.num_tokens.extend([int(listed[i]) for i in indexes])
        message.token_ids.extend([token_ids[i] for i in indexes if listed[i]])
        message.finish_reasons.extend([reasons[i] for i in indexes])
        message.final_token_ids.extend([token_ids[i] if _is_final_token(listed[i], reasons[i]) else 0 for i in indexes])
        if rows.logprobs:
            message.logprobs.extend(
                _output_logprobs(num_before + place, rows.logprobs[i])
                for place, i in enumerate(indexes)
                if i in rows.logprobs
            )


def _is_final_token(listed: bool, reason: int) -> bool:
    """An end or stop token; not the meaningless one of a numeric error."""
    return not listed and reason != types_pb2.FINISH_REASON_NUMERIC_ERROR


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
    num_sampled = [0] * outcome.num_plan_rows
    reasons = [0] * outcome.num_plan_rows
    tokens: dict[int, int] = {}
    for group in outcome.sampled:
        for plan_row, token_id, listed, reason in zip(
            group.plan_rows.tolist(),
            group.token_ids.tolist(),
            group.listed.tolist(),
            group.finish_reasons.tolist(),
            strict=True,
        ):
            num_sampled[plan_row] = int(listed)
            reasons[plan_row] = reason
            if listed:
                tokens[plan_row] = token_id
    return worker_pb2.StepResult(
        incarnation=incarnation,
        step=outcome.step,
        num_sampled=num_sampled,
        token_ids=[tokens[plan_row] for plan_row in sorted(tokens)],
        finish_reasons=reasons,  # type: ignore[arg-type]
        undelivered_rows=sorted(undelivered_rows),
        duration_ns=duration_ns,
    )
