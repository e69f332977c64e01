"""Whatever the two paths do to deltas and events, the answer comes out whole, in order, once; and it ends once.

A simulated scheduler and worker answer each attempt truthfully; hypothesis is the network between them and the stream:
it interleaves, delays, reorders, repeats and loses deltas, and breaks calls. When it is done, whatever is still under
way arrives and time passes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import ErrorKind
from router.streams.stream import Stream
from router.streams.types import (
    AttemptEnded,
    Completed,
    Failed,
    Finish,
    Finished,
    Input,
    NewPromptLogprobs,
    NewTokens,
    Output,
    Preempted,
    Progress,
    PromptDelta,
    Scheduled,
    StreamSpec,
    Submit,
    TokenDelta,
    TokenLogprob,
)

KEY, PROMPT = 5, 6


class Answer:
    """What the model says, from any position on, and how an attempt reports it."""

    def __init__(self, num_tokens: int, finish: Finish, chunk: int, has_logprobs: bool) -> None:
        self.ids = tuple(100 + i for i in range(num_tokens))
        self.finish, self.chunk, self.has_logprobs = finish, chunk, has_logprobs
        self.final = 7 if finish is Finish.STOP_TOKEN else None

    def deltas(self, submit: Submit) -> list[Input]:
        found: list[Input] = []
        if submit.prompt_logprobs_start is not None:
            for start in range(submit.prompt_logprobs_start, PROMPT, 2):
                entries = tuple(TokenLogprob(i, -1.0) for i in range(start, min(start + 2, PROMPT)))
                found.append(PromptDelta(KEY, submit.attempt, start, entries))
        position = entry_position = len(submit.prior_token_ids)
        preempted_at = (position + len(self.ids)) // 2
        while position < len(self.ids):
            if position >= preempted_at:
                entry_position = max(entry_position, position)
                preempted_at = len(self.ids)
            part = self.ids[position : position + self.chunk]
            logprobs = tuple(TokenLogprob(i, -1.0) for i in part) if self.has_logprobs else None
            tokens = TokenDelta(KEY, submit.attempt, position, part, logprobs, entry_position=entry_position)
            found.append(tokens)
            position += len(part)
        end = TokenDelta(KEY, submit.attempt, position, (), None, self.finish, self.final, entry_position)
        return [*found, end]

    def events(self, submit: Submit) -> list[Input]:
        attempt, total = submit.attempt, len(self.ids)
        return [
            Scheduled(attempt, "r"),
            Preempted(attempt),
            Scheduled(attempt, "r"),
            Progress(attempt, max(len(submit.prior_token_ids), total // 2)),
            Finished(attempt, total, self.finish),
            AttemptEnded(attempt),
        ]


class Network:
    """Holds what is under way and collects what comes out."""

    def __init__(self, stream: Stream, answer: Answer) -> None:
        self.stream, self.answer, self.now = stream, answer, 0.0
        self.deltas: list[Input] = []
        self.events: list[Input] = []
        self.token_ids: list[int] = []
        self.prompt_positions: list[int] = []
        self.ends: list[Output] = []
        self.num_plain = 0
        self.take(stream.start())

    def take(self, outputs: tuple[Output, ...]) -> None:
        for output in outputs:
            assert not self.ends, f"{output} after the end"
            match output:
                case Submit():
                    assert output.prior_token_ids == self.answer.ids[: len(output.prior_token_ids)]
                    self.deltas += self.answer.deltas(output)
                    self.events = self.answer.events(output)  # the call before is cancelled
                case NewTokens():
                    assert output.position == len(self.token_ids)
                    assert len(self.prompt_positions) in (0, PROMPT - 1)
                    assert (output.logprobs is not None) is self.stream.spec.wants_logprobs
                    if output.logprobs is not None:
                        assert tuple(entry.token_id for entry in output.logprobs) == output.token_ids
                    self.token_ids += output.token_ids
                case NewPromptLogprobs():
                    assert [entry.token_id for entry in output.logprobs] == [
                        output.start + i for i in range(len(output.logprobs))
                    ]
                    self.prompt_positions += range(output.start, output.start + len(output.logprobs))
                case Completed() | Failed():
                    self.ends.append(output)

    def feed(self, item: Input) -> None:
        """Plain deltas go the short way, beside a twin that goes the long one; all else is fed."""
        twin = copy.deepcopy(self.stream)
        fed = twin.feed(item, self.now)
        tokens = self.stream.feed_plain(item) if isinstance(item, TokenDelta) else None
        if tokens is not None:
            self.num_plain += 1
            self.take((tokens,))
        else:
            self.take(self.stream.feed(item, self.now))
        assert fed == ((tokens,) if tokens is not None else fed)
        assert state_of(self.stream) == state_of(twin)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.stream.wake(self.now))

    def settle(self) -> None:
        """Faithful delivery from here on."""
        for _ in range(400):
            if self.ends:
                return
            if self.deltas:
                self.feed(self.deltas.pop(0))
            elif self.events:
                self.feed(self.events.pop(0))
            else:
                assert self.stream.wake_at is not None, f"nothing will ever happen: {self.stream.phase}"
                self.pass_time(max(0.0, self.stream.wake_at - self.now))
        raise AssertionError(f"no end: {self.stream.phase}, attempt {self.stream.attempt}")


def state_of(stream: Stream) -> dict[str, object]:
    """All that a stream keeps, and when it is to be woken."""

    def plain(value: object) -> object:
        is_ours = type(value).__module__.startswith("router.streams") and hasattr(value, "__dict__")
        return {name: plain(one) for name, one in vars(value).items()} if is_ours else value

    return {**{name: plain(value) for name, value in vars(stream).items()}, "wake_at": stream.wake_at}


def deliver(net: Network, index: int) -> None:
    if net.deltas:
        net.feed(net.deltas.pop(0))


def deliver_out_of_order(net: Network, index: int) -> None:
    if net.deltas:
        net.feed(net.deltas.pop(index % len(net.deltas)))


def repeat(net: Network, index: int) -> None:
    if net.deltas:
        net.feed(net.deltas[index % len(net.deltas)])


def lose(net: Network, index: int) -> None:
    if net.deltas:
        net.deltas.pop(index % len(net.deltas))


def event(net: Network, index: int) -> None:
    if net.events:
        net.feed(net.events.pop(0))


def crash(net: Network, index: int) -> None:
    net.events = []
    net.feed(AttemptEnded(net.stream.attempt, True, ErrorKind.UNAVAILABLE, crash_group_size=index % 3 or None))


def wait(net: Network, index: int) -> None:
    net.pass_time(0.1 * (index % 30))


def garbage(net: Network, index: int) -> None:
    net.feed(TokenDelta(KEY + 1, net.stream.attempt, index, (1, 2)))
    net.feed(TokenDelta(KEY, net.stream.attempt + 1, index, (1, 2)))


ACTIONS: list[Callable[[Network, int], None]] = [
    deliver,
    deliver,
    event,
    event,
    deliver_out_of_order,
    repeat,
    lose,
    crash,
    wait,
    garbage,
]


@settings(max_examples=400, deadline=None)
@given(
    num_tokens=st.integers(0, 9),
    finish=st.sampled_from([Finish.END_TOKEN, Finish.STOP_TOKEN, Finish.LENGTH]),
    chunk=st.integers(1, 3),
    wants_prompt=st.booleans(),
    wants_logprobs=st.booleans(),
    steps=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 50)), max_size=40),
)
def test_any_interleaving_loss_repetition_and_order_gives_the_answer_once(
    num_tokens: int,
    finish: Finish,
    chunk: int,
    wants_prompt: bool,
    wants_logprobs: bool,
    steps: list[tuple[Callable[[Network, int], None], int]],
) -> None:
    answer = Answer(num_tokens if finish is not Finish.LENGTH else num_tokens + 1, finish, chunk, wants_logprobs)
    limit = len(answer.ids) if finish is Finish.LENGTH else 12
    positions = range(1, PROMPT) if wants_prompt else None
    spec = StreamSpec(KEY, limit, frozenset({7, 8}), 1e9, "tcp://here", wants_logprobs, positions)
    net = Network(Stream(spec), answer)
    for action, index in steps:
        if not net.ends:
            action(net, index)
    net.settle()
    assert len(net.ends) == 1
    (end,) = net.ends
    if isinstance(end, Failed):
        # Only a network that lost three attempts in a row may do this, and never after a wrong token.
        assert "brought no new token" in end.message
        assert tuple(net.token_ids) == answer.ids[: len(net.token_ids)]
        return
    assert isinstance(end, Completed)
    assert tuple(net.token_ids) == answer.ids
    assert net.prompt_positions == (list(range(1, PROMPT)) if wants_prompt else [])
    assert end.num_tokens == len(answer.ids)
    assert end.finish is finish
    assert end.receipt.num_attempts == net.stream.attempt


def test_a_stream_that_runs_as_it_should_takes_the_short_way() -> None:
    answer = Answer(5, Finish.END_TOKEN, 1, has_logprobs=False)
    net = Network(Stream(StreamSpec(KEY, 12, frozenset(), 1e9, "tcp://here")), answer)
    net.feed(Scheduled(1, "r"))
    while net.deltas:
        net.feed(net.deltas.pop(0))
    assert net.num_plain == len(answer.ids) == 5
    assert [end.finish for end in net.ends if isinstance(end, Completed)] == [Finish.END_TOKEN]
