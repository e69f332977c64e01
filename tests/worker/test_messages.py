"""TokenBatch and StepResult from outcomes made by hand."""

from __future__ import annotations

import numpy as np

from octavo.internal.v1 import types_pb2
from worker_svc.messages import MAX_PROMPT_NUMBERS, step_result, token_batches
from worker_svc.outcome import Address, Addresses, PromptStretch, SampledRows, StepOutcome, TokenLogprobs

END = types_pb2.FINISH_REASON_END_TOKEN
NUMERIC_ERROR = types_pb2.FINISH_REASON_NUMERIC_ERROR


def logprobs(num_tokens: int, num_top: int) -> TokenLogprobs:
    return TokenLogprobs(
        -np.arange(num_tokens, dtype=np.float32),
        np.arange(num_tokens * num_top).reshape(num_tokens, num_top),
        np.zeros((num_tokens, num_top), np.float32),
    )


SAMPLED = SampledRows(
    plan_rows=np.array([0, 2, 3, 4]),
    addresses=Addresses.of(Address(1, 100, 1), Address(2, 200, 3, 4), Address(1, 101, 2), Address(2, 201, 1)),
    token_ids=np.array([11, 12, 13, 14]),
    listed=np.array([True, True, False, False]),
    finish_reasons=np.array([0, 0, END, NUMERIC_ERROR]),
    output_positions=np.array([0, 5, 9, 2]),
    logprobs={1: logprobs(1, 2)},
)


def test_each_router_gets_one_message_of_its_own() -> None:
    outcome = StepOutcome(4, 5, (SAMPLED,), ())
    batches = token_batches(outcome)
    assert {router: [batch.plan_rows for batch in sent] for router, sent in batches.items()} == {
        1: [[0, 3]],
        2: [[2, 4]],
    }
    first, second = batches[1][0].message, batches[2][0].message
    assert (list(first.stream_keys), list(first.attempts), list(first.positions)) == ([100, 101], [1, 2], [0, 9])
    assert (list(first.num_tokens), list(first.token_ids)) == ([1, 0], [11])
    assert (list(first.finish_reasons), list(first.final_token_ids)) == ([0, END], [0, 13])
    assert (list(second.num_tokens), list(second.final_token_ids)) == ([1, 0], [0, 0])
    assert (list(first.entry_positions), list(second.entry_positions)) == ([0, 0], [4, 0])
    assert [(entry.index, entry.num_top, list(entry.top_token_ids)) for entry in second.logprobs] == [(0, 2, [0, 1])]


def test_the_result_has_a_place_for_every_row() -> None:
    result = step_result(StepOutcome(4, 5, (SAMPLED,), ()), 9, {2}, 1000)
    assert (result.incarnation, result.step, result.duration_ns) == (9, 4, 1000)
    assert list(result.num_sampled) == [1, 0, 1, 0, 0]
    assert list(result.token_ids) == [11, 12]
    assert list(result.finish_reasons) == [0, 0, 0, END, NUMERIC_ERROR]
    assert list(result.undelivered_rows) == [2]


def test_long_prompts_are_sent_in_bounded_pieces_before_the_tokens() -> None:
    stretch = PromptStretch(0, Address(1, 100, 1), 5, logprobs(5000, 20))
    messages = [batch.message for batch in token_batches(StepOutcome(1, 5, (SAMPLED,), (stretch,)))[1]]
    entries = [entry for message in messages for entry in message.prompt_logprobs]
    assert [len(message.stream_keys) for message in messages] == [0] * (len(messages) - 1) + [2]
    assert max(message.ByteSize() for message in messages) < 12 * MAX_PROMPT_NUMBERS
    assert [entry.start for entry in entries] == list(np.cumsum([5] + [len(entry.tokens) for entry in entries])[:-1])
    assert [value for entry in entries for value in entry.tokens] == stretch.logprobs.tokens.tolist()
    assert [value for entry in entries for value in entry.top_token_ids] == list(range(100_000))
