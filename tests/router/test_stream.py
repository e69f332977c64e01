"""The rules of one sequence's state machine, one test a rule; time is a number."""

from __future__ import annotations

import pytest

from router.errors import ErrorKind
from router.streams.parts import FIRST_BACKOFF_S
from router.streams.phases import TRANSITIONS, IllegalMove, Move, Phase
from router.streams.stream import LOSS_GRACE_S, RECEIPT_GRACE_S, Stream
from router.streams.types import (
    AttemptEnded,
    Availability,
    Completed,
    Failed,
    Finish,
    Finished,
    NewPromptLogprobs,
    NewTokens,
    Output,
    Preempted,
    Progress,
    PromptDelta,
    Queued,
    QueueMoved,
    Scheduled,
    StreamSpec,
    Submit,
    TokenDelta,
    TokenLogprob,
)

KEY = 77


def make_stream(**changes: object) -> Stream:
    values: dict[str, object] = {
        "stream_key": KEY,
        "max_tokens": 10,
        "stop_token_ids": frozenset({5, 6}),
        "recovery_timeout_s": 60.0,
        "endpoint": "tcp://127.0.0.1:9",
    }
    stream = Stream(StreamSpec(**{**values, **changes}))  # type: ignore[arg-type]
    only(stream.start(), Submit)
    return stream


def delta(position: int, *ids: int, attempt: int = 1, **more: object) -> TokenDelta:
    return TokenDelta(KEY, attempt, position, ids, **more)  # type: ignore[arg-type]


def placed(stream: Stream, attempt: int = 1, **more: object) -> None:
    assert stream.feed(Scheduled(attempt, "r0", **more), 0.0) == ()  # type: ignore[arg-type]


def only(outputs: tuple[Output, ...], kind: type) -> Output:
    assert len(outputs) == 1, outputs
    assert isinstance(outputs[0], kind), outputs
    return outputs[0]


def test_the_first_attempt_brings_nothing_along() -> None:
    spec = StreamSpec(KEY, 10, frozenset(), 60.0, "tcp://127.0.0.1:9")
    assert Stream(spec).start() == (Submit(1, (), (), None),)


def test_tokens_come_out_once_and_in_order() -> None:
    stream = make_stream()
    placed(stream)
    assert stream.feed(delta(0, 1, 2), 0) == (NewTokens(0, (1, 2), None),)
    assert stream.feed(delta(0, 1, 2), 0) == ()
    assert stream.feed(delta(1, 2, 3), 0) == (NewTokens(2, (3,), None),)
    end = stream.feed(delta(3, 4, finish=Finish.END_TOKEN, final_token_id=0), 0)
    assert end[0] == NewTokens(3, (4,), None)
    assert isinstance(end[1], Completed)
    assert (end[1].finish, end[1].num_tokens, end[1].num_counted_tokens) == (Finish.END_TOKEN, 4, 5)
    assert stream.feed(delta(4, 9), 0) == ()


def test_another_key_or_attempt_is_dropped_before_its_position_is_looked_at() -> None:
    stream = make_stream()
    placed(stream)
    assert stream.feed(TokenDelta(KEY + 1, 1, 5, (1,)), 0) == ()
    assert stream.feed(delta(5, 1, attempt=2), 0) == ()
    assert stream.feed(AttemptEnded(2, retriable=False, failure=ErrorKind.INTERNAL), 0) == ()
    assert stream.attempt == 1


def test_a_gap_resubmits_at_once_from_what_is_held() -> None:
    stream = make_stream()
    placed(stream)
    stream.feed(delta(0, 1, 2), 0)
    assert stream.feed(delta(3, 4), 0) == (Submit(2, (1, 2), (), None),)
    assert stream.feed(delta(2, 3, attempt=1), 0) == ()
    assert stream.feed(delta(2, 3, attempt=2), 0) == (NewTokens(2, (3,), None),)


def test_an_end_that_says_more_tokens_than_arrived_resubmits_after_the_grace() -> None:
    stream = make_stream()
    placed(stream)
    stream.feed(delta(0, 1), 0)
    assert stream.feed(Finished(1, 3, Finish.LENGTH), 1.0) == ()
    assert stream.feed(AttemptEnded(1), 1.0) == ()
    assert stream.wake_at == 1.0 + LOSS_GRACE_S
    assert stream.wake(stream.wake_at - 0.1) == ()
    assert stream.wake(stream.wake_at) == (Submit(2, (1,), (), None),)


def test_late_tokens_after_the_end_complete_the_sequence() -> None:
    stream = make_stream()
    placed(stream)
    stream.feed(Finished(1, 2, Finish.END_TOKEN), 1.0)
    assert stream.feed(delta(0, 1), 2.0) == (NewTokens(0, (1,), None),)
    tokens, end = stream.feed(delta(1, 2), 2.5)
    assert tokens == NewTokens(1, (2,), None)
    assert isinstance(end, Completed)


def test_progress_ahead_of_the_deltas_resubmits_after_the_grace() -> None:
    stream = make_stream()
    placed(stream)
    stream.feed(Progress(1, 2), 1.0)
    stream.feed(delta(0, 1), 2.0)
    assert stream.wake_at == 1.0 + LOSS_GRACE_S
    assert stream.wake(3.0) == (Submit(2, (1,), (), None),)


def test_progress_that_the_deltas_catch_up_with_is_forgotten() -> None:
    stream = make_stream()
    placed(stream)
    stream.feed(Progress(1, 2), 1.0)
    stream.feed(Progress(1, 4), 2.0)
    stream.feed(delta(0, 1, 2), 2.5)
    assert stream.wake_at == 2.5 + LOSS_GRACE_S
    stream.feed(delta(2, 3, 4), 3.0)
    assert stream.wake_at is None


def test_max_tokens_ends_it_even_when_the_attempt_breaks() -> None:
    stream = make_stream(max_tokens=2)
    outputs = stream.feed(delta(0, 1, 2, 3), 0)
    assert outputs == (NewTokens(0, (1, 2), None),)
    end = only(stream.feed(AttemptEnded(1, retriable=True, failure=ErrorKind.UNAVAILABLE), 0), Completed)
    assert isinstance(end, Completed)
    assert end.finish is Finish.LENGTH


def test_a_complete_sequence_waits_a_moment_for_its_receipt() -> None:
    stream = make_stream()
    assert stream.feed(delta(0, 1, finish=Finish.LENGTH), 1.0) == (NewTokens(0, (1,), None),)
    assert stream.wake_at == 1.0 + RECEIPT_GRACE_S
    end = only(stream.feed(Scheduled(1, "r7", cached_tokens=16, queue_s=0.5), 1.1), Completed)
    assert isinstance(end, Completed)
    assert (end.receipt.replica, end.receipt.cached_tokens, end.receipt.queue_s) == ("r7", 16, 0.5)


def test_a_complete_sequence_ends_without_its_receipt_after_the_grace() -> None:
    stream = make_stream()
    stream.feed(delta(0, 1, finish=Finish.LENGTH), 1.0)
    only(stream.wake(1.0 + RECEIPT_GRACE_S), Completed)


def test_a_stop_token_that_only_the_scheduler_told_of_is_waited_for() -> None:
    stream = make_stream()
    placed(stream)
    stream.feed(delta(0, 1), 0)
    assert stream.feed(Finished(1, 1, Finish.STOP_TOKEN), 0) == ()
    end = only(stream.feed(delta(1, finish=Finish.STOP_TOKEN, final_token_id=6), 0.1), Completed)
    assert isinstance(end, Completed)
    assert end.final_token_id == 6


def test_the_only_stop_token_needs_no_word_from_the_worker() -> None:
    stream = make_stream(stop_token_ids=frozenset({6}))
    placed(stream)
    end = only(stream.feed(Finished(1, 0, Finish.STOP_TOKEN), 0), Completed)
    assert isinstance(end, Completed)
    assert end.final_token_id == 6


def test_three_attempts_without_one_new_token_fail_naming_replica_and_endpoint() -> None:
    stream = make_stream()
    for attempt in (1, 2, 3):
        placed(stream, attempt)
        outputs = stream.feed(delta(4, 1, attempt=attempt), 0)
    failed = only(outputs, Failed)
    assert isinstance(failed, Failed)
    assert failed.kind is ErrorKind.UNAVAILABLE
    assert "r0" in failed.message
    assert "tcp://127.0.0.1:9" in failed.message


def test_one_new_token_starts_the_count_anew() -> None:
    stream = make_stream()
    for attempt in (1, 2):
        stream.feed(delta(4, 1, attempt=attempt), 0)
    stream.feed(delta(0, 1, attempt=3), 0)
    for attempt in (3, 4):
        only(stream.feed(delta(9, 1, attempt=attempt), 0), Submit)
    only(stream.feed(delta(9, 1, attempt=5), 0), Submit)
    only(stream.feed(delta(9, 1, attempt=6), 0), Failed)


def test_a_lost_replica_resubmits_at_once_with_the_crash_group_sizes() -> None:
    stream = make_stream()
    placed(stream)
    stream.feed(delta(0, 1), 0)
    lost = AttemptEnded(1, True, ErrorKind.UNAVAILABLE, crash_group_size=8)
    assert stream.feed(lost, 1.0) == (Submit(2, (1,), (8,), None),)
    placed(stream, 2)
    lost = AttemptEnded(2, True, ErrorKind.UNAVAILABLE, crash_group_size=4)
    assert stream.feed(lost, 2.0) == (Submit(3, (1,), (8, 4), None),)
    placed(stream, 3)
    innocent = AttemptEnded(3, True, ErrorKind.UNAVAILABLE, crash_group_size=0)
    assert stream.feed(innocent, 3.0) == (Submit(4, (1,), (8, 4), None),)


def test_crashes_and_scheduler_losses_are_not_counted_as_fruitless() -> None:
    stream = make_stream()
    for attempt in range(1, 8):
        placed(stream, attempt)
        only(stream.feed(AttemptEnded(attempt, True, ErrorKind.UNAVAILABLE), 0), Submit)


def test_undelivered_tokens_count_as_fruitless_attempts() -> None:
    stream = make_stream()
    for attempt in (1, 2):
        placed(stream, attempt)
        only(stream.feed(AttemptEnded(attempt, True, ErrorKind.UNAVAILABLE, tokens_lost=True), 0), Submit)
    placed(stream, 3)
    only(stream.feed(AttemptEnded(3, True, ErrorKind.UNAVAILABLE, tokens_lost=True), 0), Failed)


def test_an_attempt_that_no_replica_took_is_repeated_after_a_growing_pause() -> None:
    stream, now, pauses = make_stream(), 0.0, []
    for attempt in range(1, 8):
        assert stream.feed(AttemptEnded(attempt, True, ErrorKind.UNAVAILABLE), now) == ()
        assert stream.wake_at is not None
        pauses.append(round(stream.wake_at - now, 3))
        now = stream.wake_at
        only(stream.wake(now), Submit)
    assert pauses == [FIRST_BACKOFF_S, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_the_recovery_timeout_ends_a_wait_without_a_replica() -> None:
    stream, now = make_stream(recovery_timeout_s=3.0), 0.0
    placed(stream)
    outputs = stream.feed(AttemptEnded(1, True, ErrorKind.UNAVAILABLE), now)
    while not any(isinstance(output, Failed) for output in outputs):
        if outputs:
            stream.feed(AttemptEnded(stream.attempt, True, ErrorKind.UNAVAILABLE), now)
        assert stream.wake_at is not None
        now = stream.wake_at
        outputs = stream.wake(now)
    assert now == 3.0
    assert "--recovery-timeout" in str(outputs[-1])


def test_a_resumed_attempt_queued_where_replicas_are_ready_waits_on() -> None:
    stream = make_stream(recovery_timeout_s=3.0)
    placed(stream)
    stream.feed(AttemptEnded(1, True, ErrorKind.UNAVAILABLE), 0.0)
    assert stream.wake(3.0) == ()
    assert stream.wake_at == 6.0
    stream.feed(Availability(ready=False), 4.0)
    only(stream.wake(6.0), Failed)


def test_a_final_status_fails_it() -> None:
    stream = make_stream()
    failed = only(stream.feed(AttemptEnded(1, False, ErrorKind.EXHAUSTED, "queue full", retry_after_s=2.5), 0), Failed)
    assert failed == Failed(ErrorKind.EXHAUSTED, "queue full", 2.5)


def test_an_ok_end_that_told_no_finish_is_retried() -> None:
    stream = make_stream()
    placed(stream)
    only(stream.feed(AttemptEnded(1), 0), Submit)


def test_a_numeric_error_fails_the_sequence_alone() -> None:
    stream = make_stream()
    placed(stream)
    outputs = stream.feed(delta(0, finish=Finish.NUMERIC_ERROR), 0)
    failed = only(outputs, Failed)
    assert isinstance(failed, Failed)
    assert failed.kind is ErrorKind.INTERNAL


def test_the_receipt_adds_up_over_attempts() -> None:
    stream = make_stream()
    placed(stream, 1, cached_tokens=32, queue_s=1.0, numerics="n")
    stream.feed(Preempted(1), 0)
    placed(stream, 1, cached_tokens=16, recomputed_tokens=5, queue_s=0.5)
    stream.feed(AttemptEnded(1, True, ErrorKind.UNAVAILABLE), 0)
    stream.feed(Scheduled(2, "r1", 0, 7, 0.25, "m", True), 0)
    end = stream.feed(delta(0, 1, attempt=2, finish=Finish.LENGTH), 0)[-1]
    assert isinstance(end, Completed)
    receipt = end.receipt
    assert (receipt.queue_s, receipt.cached_tokens, receipt.recomputed_tokens) == (1.75, 32, 12)
    assert (receipt.num_preemptions, receipt.num_attempts, receipt.replica) == (1, 2, "r1")
    assert (receipt.numerics, receipt.batch_invariant) == ("m", True)


def logprobs(*ids: int) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token_id, -float(token_id)) for token_id in ids)


def test_prompt_logprobs_come_before_the_first_tokens() -> None:
    stream = make_stream(prompt_logprob_positions=range(1, 4))
    placed(stream)
    assert stream.feed(delta(0, 1), 0) == ()
    assert stream.feed(PromptDelta(KEY, 1, 1, logprobs(11, 12)), 0) == (NewPromptLogprobs(1, logprobs(11, 12)),)
    assert stream.feed(PromptDelta(KEY, 1, 2, logprobs(12, 13)), 0) == (
        NewPromptLogprobs(3, logprobs(13)),
        NewTokens(0, (1,), None),
    )


def test_missing_prompt_logprobs_are_asked_for_again_from_the_first_missing_one() -> None:
    stream = make_stream(prompt_logprob_positions=range(1, 9), max_tokens=2)
    placed(stream)
    stream.feed(PromptDelta(KEY, 1, 1, logprobs(11, 12)), 0)
    assert stream.feed(PromptDelta(KEY, 1, 5, logprobs(15)), 0) == (Submit(2, (), (), 3),)
    stream.feed(delta(0, 1, 2, attempt=2, finish=Finish.LENGTH), 0)
    assert stream.wake(LOSS_GRACE_S) == (Submit(3, (1,), (), 3),)
    outputs = stream.feed(PromptDelta(KEY, 3, 3, logprobs(*range(13, 19))), 3.0)
    assert outputs[1] == NewTokens(0, (1, 2), None)
    only(stream.feed(Scheduled(3, "r0"), 3.0), Completed)


def test_tokens_whose_logprobs_are_missing_count_as_lost() -> None:
    stream = make_stream(wants_logprobs=True)
    placed(stream)
    assert stream.feed(delta(0, 1, logprobs=logprobs(1)), 0) == (NewTokens(0, (1,), logprobs(1)),)
    only(stream.feed(delta(1, 2), 0), Submit)


@pytest.mark.parametrize("tokens_come_first", [False, True])
def test_tokens_of_the_next_replica_may_overtake_those_of_the_one_before_a_preemption(tokens_come_first: bool) -> None:
    stream = make_stream(max_tokens=6)
    placed(stream)
    stream.feed(delta(0, 1), 0)

    def tell_of_the_preemption() -> None:
        stream.feed(Preempted(1), 1)
        placed(stream)

    if not tokens_come_first:
        tell_of_the_preemption()
    assert stream.feed(delta(3, 4, entry_position=3), 1) == ()
    assert stream.feed(delta(4, 5, entry_position=3), 1) == ()
    if tokens_come_first:
        tell_of_the_preemption()
    assert stream.feed_plain(delta(1, 2)) is None  # what waits behind it must follow
    assert stream.feed(delta(1, 2), 1) == (NewTokens(1, (2,), None),)
    late = stream.feed(delta(2, 3), 1)
    assert late == (NewTokens(2, (3,), None), NewTokens(3, (4,), None), NewTokens(4, (5,), None))
    assert stream.wake_at is None
    assert stream.feed_plain(delta(5, 6, entry_position=3)) is None
    (tokens, end) = stream.feed(delta(5, 6, finish=Finish.LENGTH, entry_position=3), 1)
    assert tokens == NewTokens(5, (6,), None)
    assert isinstance(end, Completed)
    assert (end.receipt.num_attempts, end.receipt.num_preemptions) == (1, 1)


def test_tokens_that_a_preempted_attempt_lost_are_asked_for_again() -> None:
    stream = make_stream()
    placed(stream)
    stream.feed(Preempted(1), 0)
    placed(stream)
    assert stream.feed(delta(2, 3, entry_position=1), 1) == ()
    assert stream.wake_at == 1 + LOSS_GRACE_S
    again = only(stream.wake(1 + LOSS_GRACE_S), Submit)
    assert again == Submit(2, (), (), None)
    assert stream.feed(delta(2, 3, attempt=2), 4) == (Submit(3, (), (), None),)  # it was not preempted


def test_tokens_that_the_next_replica_lost_are_asked_for_again_at_once() -> None:
    stream = make_stream()
    placed(stream)
    stream.feed(Preempted(1), 0)
    placed(stream)
    stream.feed(delta(0, 1, 2), 1)
    assert stream.feed(delta(3, 4, entry_position=2), 1) == (Submit(2, (1, 2), (), None),)


def test_queue_positions_pass_through() -> None:
    assert make_stream().feed(Queued(1, 3, 0.5), 0) == (QueueMoved(3, 0.5),)


def test_nothing_comes_out_after_stop() -> None:
    stream = make_stream()
    placed(stream)
    stream.stop()
    stream.stop()
    assert stream.feed(delta(0, 1), 0) == ()
    assert stream.wake_at is None
    assert stream.wake(9.0) == ()


def test_an_illegal_move_raises_and_changes_nothing() -> None:
    stream = make_stream()
    with pytest.raises(IllegalMove, match="open"):
        stream._move(Move.RETRY)
    assert stream.phase is Phase.OPEN
    assert not any(start is Phase.ENDED for start, _ in TRANSITIONS)
