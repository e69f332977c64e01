"""The shared plumbing: cells, exposition, bounds, and the port that is scraped."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from octavo.metrics import MAX_SERIES, OTHER, Metric, MetricSet, counter, gauge, histogram, serve_metrics
from octavo.process import StartError

JOBS = counter("test_jobs_total", "Jobs.", "kind")
DEPTH = gauge("test_depth", "Depth.")
TIMES = histogram("test_seconds", "Times.", (0.1, 1.0, 10.0), "kind")


def made(*more: Metric) -> MetricSet:
    return MetricSet((JOBS, DEPTH, TIMES, *more))


def samples(metrics: MetricSet) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """What a scrape shows, by name and labels."""
    body, _ = metrics.render()
    families: Any = parse_text(body.decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_scrape_shows_what_was_counted() -> None:
    metrics = made()
    metrics.number(JOBS, "good").add()
    metrics.number(JOBS, "good").add(2.5)
    metrics.number(DEPTH).set(7)
    for value in (0.05, 0.1, 0.5, 100.0):
        metrics.distribution(TIMES, "good").observe(value)
    found = samples(metrics)
    good = ("kind", "good")
    assert found["test_jobs_total", (good,)] == 3.5
    assert found["test_depth", ()] == 7
    buckets = [found["test_seconds_bucket", (good, ("le", bound))] for bound in ("0.1", "1.0", "10.0", "+Inf")]
    assert buckets == [2, 3, 3, 4]
    assert found["test_seconds_count", (good,)] == 4
    assert found["test_seconds_sum", (good,)] == pytest.approx(100.65)
    assert ("process_resident_memory_bytes", ()) in found


@given(st.lists(st.floats(0, 1e6, allow_nan=False)))
def test_buckets_equal_their_definition(values: list[float]) -> None:
    bounds = (0.001, 0.1, 1.0, 1000.0)
    times = histogram("test_any_seconds", "Times.", bounds)
    metrics = MetricSet((times,))
    for value in values:
        metrics.distribution(times).observe(value)
    (family,) = [family for family in metrics.collect() if family.name == "test_any_seconds"]
    shown = {sample.labels["le"]: sample.value for sample in family.samples if sample.name.endswith("_bucket")}
    if values:
        assert list(shown.values()) == [sum(v <= bound for v in values) for bound in (*bounds, float("inf"))]


def test_openmetrics_is_spoken_to_those_who_ask() -> None:
    metrics = made()
    metrics.number(JOBS, "good").add()
    metrics.distribution(TIMES, "good").observe(1)
    body, content_type = metrics.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    families: Any = parse_openmetrics(body.decode())  # type: ignore[no-untyped-call]
    names = {sample.name for family in families for sample in family.samples}
    assert {"test_jobs_total", "test_seconds_bucket"} <= names


def test_the_number_of_series_is_bounded() -> None:
    metrics = made()
    for number in range(MAX_SERIES + 20):
        metrics.number(JOBS, f"kind {number}").add()
    found = samples(metrics)
    assert sum(name == "test_jobs_total" for name, _ in found) == MAX_SERIES + 1
    assert found["test_jobs_total", (("kind", OTHER),)] == 20
    metrics.replace(JOBS, {(f"kind {number}",): 1 for number in range(MAX_SERIES + 5)})
    assert samples(metrics)["test_jobs_total", (("kind", OTHER),)] == 5


def test_what_is_replaced_is_gone() -> None:
    metrics = made()
    metrics.replace(JOBS, {("old",): 1})
    metrics.replace(JOBS, {("new",): 2})
    assert [key for key in samples(metrics) if key[0] == "test_jobs_total"] == [("test_jobs_total", (("kind", "new"),))]
    assert metrics.total(JOBS) == 2


def test_two_sets_know_nothing_of_each_other() -> None:
    one, other = made(), made()
    one.number(JOBS, "good").add()
    assert other.total(JOBS) == 0


@pytest.mark.parametrize(
    ("name", "kind", "buckets"),
    [("jobs", "counter", ()), ("jobs_total", "gauge", ()), ("seconds", "histogram", ()), ("depth", "gauge", (1.0,))],
)
def test_a_name_or_shape_against_the_rules_is_refused(name: str, kind: Any, buckets: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=name):
        Metric(name, kind, "", (), buckets)


def test_wrong_label_values_are_refused() -> None:
    with pytest.raises(ValueError, match="test_jobs_total"):
        made().number(JOBS, "one", "two")


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs in a thread of its own."""
    running = asyncio.new_event_loop()
    thread = threading.Thread(target=running.run_forever)
    thread.start()
    yield running
    running.call_soon_threadsafe(running.stop)
    thread.join()
    running.close()


def test_a_port_answers_with_what_is_so_then(loop: asyncio.AbstractEventLoop) -> None:
    from scheduler_svc.watch import call_in

    threads = []
    metrics = MetricSet((DEPTH,), call=call_in(loop))

    def refresh() -> None:
        threads.append(threading.current_thread())
        metrics.number(DEPTH).add()

    metrics.on_scrape(refresh)
    server = serve_metrics(metrics, "127.0.0.1", 0)
    try:
        for expected in ("test_depth 1.0", "test_depth 2.0"):
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
                assert expected in answer.read().decode().splitlines()
        assert threading.current_thread() not in threads
        assert len(set(threads)) == 1  # the loop's, whichever thread answers
        with pytest.raises(StartError, match=rf"--metrics-port: 127\.0\.0\.1:{server.port} cannot be bound"):
            serve_metrics(made(), "127.0.0.1", server.port)
    finally:
        server.close()


@pytest.mark.parametrize(("host", "is_told"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_figures_that_strangers_can_read_are_warned_of(
    host: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    serve_metrics(made(), host, 0).close()
    assert (f"open to the network: --metrics-host {host}" in caplog.text) is is_told
