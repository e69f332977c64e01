"""What a process counts and times, and how Prometheus reads it.

A process declares its metrics as a catalogue of `Metric`s and keeps them in one `MetricSet`; there is no global
registry. Cells are plain Python numbers: an observation on a hot path costs a fraction of a microsecond, and everything
else is done when somebody scrapes. Writers and the scraping thread need no lock: a cell has one writer, and a reader
that comes between two of its steps sees a histogram's sum at most one observation behind its counts.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from octavo.addresses import is_local_host
from octavo.process import StartError

_LOG = logging.getLogger(__name__)

Kind = Literal["counter", "gauge", "histogram"]
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily

MAX_SERIES = 1000
"""Most label combinations of one metric. What comes after them is counted together, as OTHER."""

OTHER = "other"

LATENCY_BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
)
"""From a cached prefix on an idle GPU to a prompt that waits behind a full queue."""

TOKEN_BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
)
"""Times between tokens."""

COUNT_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Tokens and rows: powers of two."""


@dataclass(frozen=True)
class Metric:
    """One entry of a catalogue. A counter's name ends in `_total`; `buckets` are upper bounds, a histogram's alone."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if (self.kind == "counter") != self.name.endswith("_total"):
            raise ValueError(f"{self.name}: a counter's name, and no other, ends in _total")
        if (self.kind == "histogram") != bool(self.buckets):
            raise ValueError(f"{self.name}: a histogram, and nothing else, has buckets")

    @property
    def sample_names(self) -> tuple[str, ...]:
        """The names that queries use."""
        suffixes = ("_bucket", "_sum", "_count") if self.kind == "histogram" else ("",)
        return tuple(self.name + suffix for suffix in suffixes)


def counter(name: str, help: str, *labels: str) -> Metric:
    """A number that only grows."""
    return Metric(name, "counter", help, labels)


def gauge(name: str, help: str, *labels: str) -> Metric:
    """A number that goes up and down."""
    return Metric(name, "gauge", help, labels)


def histogram(name: str, help: str, buckets: Sequence[float], *labels: str) -> Metric:
    """How often a value was how large."""
    return Metric(name, "histogram", help, labels, tuple(buckets))


class Number:
    """A counter's or gauge's cell. Hot paths may add to `value` themselves."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, amount: float = 1) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value


class Distribution:
    """A histogram's cell."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """One value; on a bound it belongs below it."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value


Cell = TypeVar("Cell", Number, Distribution)


class _Series:
    """The cells of one metric by label values, bounded in number."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.cells: dict[tuple[str, ...], Number | Distribution] = {}

    def at(self, labels: tuple[str, ...]) -> Number | Distribution:
        found = self.cells.get(labels)
        if found is not None:
            return found
        if len(labels) != len(self.metric.labels):
            raise ValueError(f"{self.metric.name} has the labels {self.metric.labels}, got values {labels}")
        if len(self.cells) >= MAX_SERIES and set(labels) != {OTHER}:
            return self.at((OTHER,) * len(labels))
        cell = Distribution(self.metric.buckets) if self.metric.kind == "histogram" else Number()
        # A new dict: the scraping thread may be walking the old one.
        self.cells = {**self.cells, labels: cell}
        return cell

    def family(self) -> Family:
        metric = self.metric
        if metric.kind == "histogram":
            histograms = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
            for labels, cell in self.cells.items():
                assert isinstance(cell, Distribution)
                histograms.add_metric(labels, _cumulated(metric.buckets, tuple(cell.counts)), cell.sum)
            return histograms
        family_class = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        numbers = family_class(metric.name, metric.help, labels=metric.labels)
        for labels, cell in self.cells.items():
            assert isinstance(cell, Number)
            numbers.add_metric(labels, cell.value)
        return numbers


class MetricSet(Collector):
    """The metrics of one process. Fetch a cell once, and keep it where it is used often."""

    def __init__(
        self, catalogue: Iterable[Metric], *, call: Callable[[Callable[[], None]], None] = lambda refresh: refresh()
    ) -> None:
        """`call` runs a refresher where its data may be read, such as in an event loop, and returns when it is done."""
        self._series = {metric.name: _Series(metric) for metric in catalogue}
        self._refreshers: list[Callable[[], None]] = []
        self._call = call
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def number(self, metric: Metric, *labels: str) -> Number:
        """The cell of a counter or gauge at these label values; a counter without labels shows 0 from the start."""
        cell = self._series[metric.name].at(labels)
        assert isinstance(cell, Number), f"{metric.name} is a histogram"
        return cell

    def distribution(self, metric: Metric, *labels: str) -> Distribution:
        """The cell of a histogram at these label values."""
        cell = self._series[metric.name].at(labels)
        assert isinstance(cell, Distribution), f"{metric.name} is no histogram"
        return cell

    def replace(self, metric: Metric, values: Mapping[tuple[str, ...], float]) -> None:
        """Show these values of a counter or gauge and no others, for what is read from elsewhere at each scrape."""
        series = _Series(metric)
        for labels, value in values.items():
            cell = series.at(labels)
            assert isinstance(cell, Number)
            cell.value += value  # what went to OTHER adds up
        self._series[metric.name] = series

    def total(self, metric: Metric) -> float:
        """The sum over all label values of a counter or gauge."""
        return sum(cell.value for cell in self._series[metric.name].cells.values() if isinstance(cell, Number))

    def on_scrape(self, refresh: Callable[[], None]) -> None:
        """Call `refresh` before each scrape, to bring in what is read and not counted."""
        self._refreshers.append(refresh)

    def refresh(self) -> None:
        """Bring everything up to date."""
        for each in self._refreshers:
            self._call(each)

    def collect(self) -> Iterator[Family]:
        """For prometheus_client."""
        self.refresh()
        for series in tuple(self._series.values()):
            yield series.family()

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """What a scrape gets: the body and its content type, for an Accept header."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


@dataclass(frozen=True)
class MetricsServer:
    """GET /metrics on a port of its own, answered by a thread that does not keep the process from ending.

    `port` is the one that was bound. `close` takes up to half a second: a process that ends need not call it.
    """

    port: int
    close: Callable[[], None]


def serve_metrics(metrics: MetricSet, host: str, port: int) -> MetricsServer:
    """Start answering; 0 picks a free port. Warns where strangers may ask. Raises StartError when it cannot listen."""
    try:
        server, thread = start_http_server(port, host, metrics.registry)
    except OSError as error:
        raise StartError(
            f"--metrics-port: {host}:{port} cannot be bound ({error.strerror or error}); choose another --metrics-port "
            "or --metrics-host"
        ) from None

    if not is_local_host(host):
        _LOG.warning(
            "open to the network: --metrics-host %s: whoever reaches port %d reads this process's metrics, without key "
            "or TLS; keep the port inside a network of their own",
            host,
            server.server_port,
        )

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return MetricsServer(server.server_port, close)


def _cumulated(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Prometheus' form of buckets: each counts everything up to its bound."""
    names = [str(floatToGoString(bound)) for bound in (*bounds, float("inf"))]  # type: ignore[no-untyped-call]
    running = 0
    found: list[tuple[str, float]] = []
    for name, count in zip(names, counts, strict=True):
        running += count
        found.append((name, running))
    return found
