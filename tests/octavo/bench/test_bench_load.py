"""Closed and open loops in virtual time, over a server that takes as long as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

import pytest

from octavo.bench.load import Load, arrival_times, at_times, closed_loop, open_loop
from octavo.bench.records import Answer, AskError, BenchRequest, Record
from tests.simulation.virtual_time import VirtualLoop, run_virtually


@dataclass
class SlowServer:
    """Answers after `first_s`, then a token each `gap_s`; a prompt `refuse` is refused, `break` is a defect."""

    first_s: float = 1.0
    gap_s: float = 0.1
    label: str = "slow"
    num_open: int = 0
    most_open: int = 0
    asked_at_s: list[float] = field(default_factory=list)

    async def ask(self, request: BenchRequest, note_tokens: Callable[[int], None]) -> Answer:
        self.asked_at_s.append(asyncio.get_running_loop().time())
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            if request.prompt == "refuse":
                raise AskError("HTTP 429", "full")
            if request.prompt == "break":
                raise ZeroDivisionError("a defect of ours")
            await asyncio.sleep(self.first_s)
            note_tokens(1)
            for _ in range(request.max_tokens - 1):
                await asyncio.sleep(self.gap_s)
                note_tokens(1)
        finally:
            self.num_open -= 1
        return Answer(5, request.max_tokens)

    async def tokenize(self, text: str) -> list[int]:
        raise NotImplementedError

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


def requests(*prompts: str, max_tokens: int = 3) -> list[BenchRequest]:
    return [BenchRequest(prompt, max_tokens) for prompt in prompts]


def test_a_closed_loop_keeps_so_many_open_and_times_each() -> None:
    server, seen = SlowServer(), list[Record]()

    async def main(loop: VirtualLoop) -> list[Record]:
        return await closed_loop(server, requests(*"abcdefg"), 3, 60.0, seen.append)

    records = run_virtually(main)
    assert server.most_open == 3
    assert len(records) == len(seen) == 7
    # Three lanes, 1.2 s a request: the seventh begins when two have ended in its lane.
    assert sorted(round(record.due_s, 6) for record in records) == [0, 0, 0, 1.2, 1.2, 1.2, 2.4]
    for record in records:
        assert record.ttft_s == pytest.approx(1.0)
        assert record.tpot_s == pytest.approx(0.1)
        assert record.gaps_s == pytest.approx([0.1, 0.1])
        assert record.e2e_s == pytest.approx(1.2)


def test_an_open_loop_sends_on_time_whatever_the_server_does() -> None:
    server = SlowServer(first_s=10.0)
    times = list(islice(arrival_times(2.0, "poisson", seed=3), 6))

    async def main(loop: VirtualLoop) -> list[Record]:
        return await open_loop(server, requests(*"abcdef"), times, 60.0, lambda record: None)

    records = run_virtually(main)
    assert server.asked_at_s == pytest.approx(times)
    assert [record.sent_s - record.due_s for record in records] == pytest.approx([0.0] * 6)
    assert server.most_open == 6


def test_failures_are_counted_by_kind_and_late_answers_are_cut() -> None:
    server = SlowServer()

    async def main(loop: VirtualLoop) -> list[Record]:
        asked = [*requests("refuse"), *requests("slow", max_tokens=100)]
        return await closed_loop(server, asked, 1, 5.0, lambda record: None)

    refused, late = run_virtually(main)
    assert (refused.error_kind, refused.error_message) == ("HTTP 429", "HTTP 429: full")
    assert (late.error_kind, late.is_complete) == ("timeout", False)
    assert late.ended_s - late.due_s == pytest.approx(5.0)
    assert server.num_open == 0


def test_a_defect_of_ours_is_not_taken_for_the_servers() -> None:
    async def main(loop: VirtualLoop) -> None:
        await closed_loop(SlowServer(), requests("break"), 1, 5.0, lambda record: None)

    with pytest.raises(ExceptionGroup) as caught:
        run_virtually(main)
    assert caught.group_contains(ZeroDivisionError)


def test_arrivals_are_the_same_for_the_same_seed_and_have_the_rate() -> None:
    first, again, other = (list(islice(arrival_times(4.0, "poisson", seed), 4000)) for seed in (1, 1, 2))
    assert first == again != other
    assert first == sorted(first)
    assert len(first) / first[-1] == pytest.approx(4.0, rel=0.05)
    gaps = [later - earlier for earlier, later in pairwise(first)]
    mean = sum(gaps) / len(gaps)
    # Of an exponential distribution, the standard deviation is the mean.
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.1)
    assert list(islice(arrival_times(4.0, "fixed", 1), 3)) == [0.25, 0.5, 0.75]


def test_a_trace_plays_at_its_own_times() -> None:
    asked = [BenchRequest("a", 1, at_s=10.0), BenchRequest("b", 1, at_s=14.0)]
    assert at_times(asked, Load("trace", 2.0), "poisson", 0) == [0.0, 2.0]
    with pytest.raises(ValueError, match="has no times for 1 requests"):
        at_times([BenchRequest("a", 1)], Load("trace", 1.0), "poisson", 0)
    assert [str(Load(*each)) for each in (("concurrency", 8.0), ("rate", 2.5), ("trace", 1.0))] == [
        "8 at once",
        "2.5/s",
        "trace x1",
    ]
