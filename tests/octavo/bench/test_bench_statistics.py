"""Figures against values worked out by hand, and what is good enough."""

from __future__ import annotations

import pytest

from octavo.bench.records import Answer, Record
from octavo.bench.slo import Slo
from octavo.bench.statistics import Latency, Summary, summarize


def record(due_s: float, *arrivals_s: float, num_output: int | None = None, error: str | None = None) -> Record:
    found = Record(due_s=due_s, sent_s=due_s + 0.001, ended_s=arrivals_s[-1] if arrivals_s else due_s + 0.5)
    found.arrivals_s = list(arrivals_s)
    found.num_arrived_tokens = len(arrivals_s)
    if error is None:
        found.answer = Answer(10, num_output, 4)
    else:
        found.error_kind, found.error_message = error, f"{error}: why"
    return found


def test_percentiles_are_values_that_occurred() -> None:
    latency = Latency.of([value / 1000 for value in range(1, 101)])
    assert (latency.p50, latency.p90, latency.p99, latency.longest) == pytest.approx((50, 90, 99, 100))
    assert latency.mean == pytest.approx(50.5)
    assert Latency.of([None, 0.007]) == Latency(7.0, 7.0, 7.0, 7.0, 7.0)
    assert Latency.of([None]) == Latency(0.0, 0.0, 0.0, 0.0, 0.0)


def test_a_run_is_summed_up() -> None:
    # Two answers, one of which brought two tokens in its last message and counts an end token; one failure.
    records = [
        record(0.0, 1.0, 1.5, 2.0, num_output=5),
        record(1.0, 1.5, 4.0),
        record(2.0, error="HTTP 429"),
    ]
    found = summarize(records, Slo(ttft_ms=800), client_cores=0.25)
    assert (found.num_requests, found.num_complete, found.errors) == (3, 2, {"HTTP 429": 1})
    assert found.seconds == pytest.approx(4.0)
    assert (found.num_prompt_tokens, found.num_output_tokens, found.num_cached_tokens) == (20, 5 + 2, 8)
    assert found.output_tokens_per_s == pytest.approx(7 / 4)
    assert found.total_tokens_per_s == pytest.approx(27 / 4)
    assert found.requests_per_s == pytest.approx(2 / 4)
    assert (found.ttft_ms.p50, found.ttft_ms.p99) == pytest.approx((500, 1000))
    assert (found.tpot_ms.p50, found.tpot_ms.p99) == pytest.approx((1000 / 4, 2500))
    assert (found.itl_ms.p50, found.itl_ms.longest) == pytest.approx((500, 2500))
    assert (found.e2e_ms.p50, found.e2e_ms.p99) == pytest.approx((2000, 3000))
    assert found.slo_share == pytest.approx(1 / 3)
    assert found.goodput_per_s == pytest.approx(1 / 4)
    assert found.latest_send_ms == pytest.approx(1.0)
    assert found.error_example == "HTTP 429: why"
    assert Summary.from_json(found.to_json()) == found


def test_without_limits_there_is_no_goodput_and_without_requests_no_summary() -> None:
    found = summarize([record(0.0, 1.0)], None)
    assert (found.slo_share, found.goodput_per_s) == (None, None)
    assert found.tpot_ms.p50 == 0
    with pytest.raises(ValueError, match="nothing to summarize"):
        summarize([], None)


@pytest.mark.parametrize(
    ("slo", "is_met"),
    [
        ("ttft=1000", True),
        ("ttft=999", False),
        ("tpot=500,e2e=2000", True),
        ("tpot=499", False),
        ("itl=700", True),
        ("itl=699", False),
        ("ttft=1000,e2e=1999", False),
    ],
)
def test_an_slo_bounds_every_latency_it_names(slo: str, is_met: bool) -> None:
    assert Slo.parse(slo).is_met(record(0.0, 1.0, 1.3, 2.0)) is is_met


def test_what_failed_keeps_no_slo_and_one_token_has_no_tpot() -> None:
    assert not Slo.parse("e2e=1e6").is_met(record(0.0, 0.1, error="cut"))
    assert Slo.parse("tpot=1").is_met(record(0.0, 1.0))
    assert not Slo.parse("ttft=1").is_met(record(0.0))


@pytest.mark.parametrize("text", ["", "ttft", "ttft=0", "speed=3", "ttft=5;tpot=3", "ttft=-1"])
def test_a_limit_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is no limit such as ttft=500"):
        Slo.parse(text)


def test_an_slo_reads_back_as_words() -> None:
    assert str(Slo.parse("tpot=50, ttft=500")) == "TTFT 500 ms, TPOT 50 ms"
