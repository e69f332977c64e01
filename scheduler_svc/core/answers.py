"""What the answer to a plan means for its rows: tokens appended, blocks made findable, rows ended or settled.

Knows one replica's rows; must not know queues, events or how steps are made.
"""

from __future__ import annotations

from scheduler_svc.core.plan import StepResult
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.sequence import Move, State
from scheduler_svc.core.step import Answer, UnansweredPlan
from scheduler_svc.core.types import FinishReason


def take_answer(rows: Rows, plan: UnansweredPlan, result: StepResult) -> Answer:
    """Applies the result of a plan, which it answers and which is no longer listed as unanswered."""
    answer = Answer()
    _append_tokens(plan, result)
    if rows.suspects:
        _clear_suspects(rows, plan, result)
    _commit(rows, plan, result, answer)
    _end_rows(rows, plan, result, answer)
    _settle(plan, answer)
    for sequence in plan.last_of:
        if sequence.state is State.RUNNING:
            rows.end(sequence, sequence.num_planned_tokens)
            answer.finished.append((sequence, FinishReason.LENGTH))
    return answer


def _clear_suspects(rows: Rows, plan: UnansweredPlan, result: StepResult) -> None:
    sampled = {plan.rows[row] for row, num in enumerate(result.num_sampled) if num}
    for sequence in [suspect for suspect in rows.suspects if suspect in sampled]:
        rows.clear(sequence)


def _commit(rows: Rows, plan: UnansweredPlan, result: StepResult, answer: Answer) -> None:
    """Makes findable what is full and answered for."""
    for row in (*plan.edge_rows, *range(plan.num_steady, len(plan.rows))):
        if row not in plan.departed and row not in result.finishes:
            rows.commit(plan.rows[row], plan.starts[row] + plan.counts[row])
            answer.advanced.append(plan.rows[row])


def _end_rows(rows: Rows, plan: UnansweredPlan, result: StepResult, answer: Answer) -> None:
    """Ends the rows that could not be delivered, then those that the worker ended."""
    for row in (*result.undelivered_rows, *result.finishes):
        sequence = plan.rows[row]
        if sequence.state is State.ENDED:
            continue
        reason = result.finishes.get(row)
        if reason is FinishReason.NUMERIC_ERROR:
            rows.kv.forget_own(sequence)
            num_trusted = 0
        else:
            num_trusted = plan.starts[row] + plan.counts[row]
        rows.end(sequence, num_trusted)
        if reason is None or row in result.undelivered_rows:
            answer.undelivered.append(sequence)
        else:
            answer.finished.append((sequence, reason))


def _settle(plan: UnansweredPlan, answer: Answer) -> None:
    """Counts down what preempted sequences still wait for."""
    for row in sorted(plan.departed):
        sequence = plan.rows[row]
        if sequence.state is not State.SETTLING:
            continue
        sequence.num_unanswered_rows -= 1
        if sequence.num_unanswered_rows:
            continue
        sequence.replica_id = None
        if sequence in plan.last_of:
            sequence.move(Move.END)
            answer.finished.append((sequence, FinishReason.LENGTH))
        else:
            sequence.move(Move.SETTLE)
            answer.settled.append(sequence)


def _append_tokens(plan: UnansweredPlan, result: StepResult) -> None:
    """Appends sampled tokens to their sequences: all that run, and preempted ones, whose KV alone is lost."""
    token_ids, departed, index = result.token_ids, plan.departed, 0
    for row, num in enumerate(result.num_sampled):
        if num:
            if row not in departed or plan.rows[row].state is State.SETTLING:
                plan.rows[row].token_ids.append(token_ids[index])
            index += num
