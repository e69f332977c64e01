"""A scrape as tests look at it: samples by name and labels."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families


class Scrape:
    """One answer to GET /metrics."""

    def __init__(self, text: str) -> None:
        families = text_string_to_metric_families(text)
        self.samples = [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]

    @property
    def names(self) -> set[str]:
        """Of all samples."""
        return {name for name, _, _ in self.samples}

    def of(self, name: str, /, **labels: str) -> float:
        """The sum of the samples of that name whose labels include these; fails where there is none."""
        found = self._matching(name, labels.items())
        assert found, f"no sample {name} {labels}"
        return sum(found)

    def has(self, name: str, /, **labels: str) -> bool:
        """Whether there is a sample of that name with these labels."""
        return bool(self._matching(name, labels.items()))

    def _matching(self, name: str, labels: Iterable[tuple[str, str]]) -> list[float]:
        wanted = set(labels)
        return [value for other, found, value in self.samples if other == name and wanted <= set(found.items())]


def scrape(port: int) -> Scrape:
    """What a process on loopback shows now."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return Scrape(answer.read().decode())
