"""Names of metrics: every one that the dashboard and the alert rules use exists, and each that exists is documented."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo.metrics import Metric
from router.metrics_catalogue import CATALOGUE as ROUTER
from scheduler_svc.metrics import CATALOGUE as SCHEDULER
from worker_svc.metrics import CATALOGUE as WORKER

ROOT = Path(__file__).parent.parent.parent
METRICS: tuple[Metric, ...] = (*ROUTER, *SCHEDULER, *WORKER)
BY_SAMPLE = {sample: metric for metric in METRICS for sample in metric.sample_names}
NOT_OURS = {"up", "process_cpu_seconds_total", "process_resident_memory_bytes"}
"""What Prometheus and its client library bring."""

_FUNCTIONS = {"histogram_quantile", "sum", "rate", "increase", "avg", "absent", "deriv", "max", "min", "label_values"}
_WORDS = _FUNCTIONS | {"by", "le", "and", "or", "unless", "without", "on"}
_SELECTOR = re.compile(r"([a-z_][a-z0-9_]*)\{([^}]*)\}")
_GROUPING = re.compile(r"\b(?:by|without|on) \(([^)]*)\)")


def panels(found: Any) -> Iterator[Any]:
    for panel in found:
        yield panel
        yield from panels(panel.get("panels", []))


def dashboard() -> Any:
    return json.loads((ROOT / "deploy/grafana/dashboards/octavo.json").read_text(encoding="utf-8"))


def read_yaml(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def rules() -> list[Any]:
    return [rule for group in read_yaml("deploy/prometheus/alerts.yml")["groups"] for rule in group["rules"]]


def expressions() -> list[tuple[str, str]]:
    """(where, PromQL) of everything that is asked."""
    found = [(rule["alert"], rule["expr"]) for rule in rules()]
    for panel in panels(dashboard()["panels"]):
        found += [(panel["title"], target["expr"]) for target in panel.get("targets", [])]
    found += [("variable", each["query"]["query"]) for each in dashboard()["templating"]["list"]]
    return found


def names_in(expression: str) -> set[str]:
    """The metrics of an expression: words that are neither functions, labels, ranges nor numbers."""
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\"[^\"]*\"", "", expression)
    bare = _GROUPING.sub("", bare)
    bare = re.sub(r"label_values\((\w+), \w+\)", r"\1", bare)
    return {word for word in re.findall(r"[a-z_][a-z0-9_]*", bare) if word not in _WORDS}


@pytest.mark.parametrize(("where", "expression"), expressions())
def test_every_metric_that_is_asked_for_exists(where: str, expression: str) -> None:
    names = names_in(expression)
    assert names, where
    assert names <= BY_SAMPLE.keys() | NOT_OURS
    assert expression.count("(") == expression.count(")")


@pytest.mark.parametrize(("where", "expression"), expressions())
def test_labels_that_are_selected_and_grouped_by_exist(where: str, expression: str) -> None:
    added = {"job", "instance", "le"}
    for name, selector in _SELECTOR.findall(expression):
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
        allowed = set(BY_SAMPLE[name].labels) if name in BY_SAMPLE else set()
        assert labels <= allowed | added, (where, name)
    for grouping in _GROUPING.findall(expression):
        allowed = {label for name in names_in(expression) & BY_SAMPLE.keys() for label in BY_SAMPLE[name].labels}
        assert set(grouping.replace(" ", "").split(",")) <= allowed | added, where


def test_the_search_for_names_finds_what_is_wrong() -> None:
    nested = 'histogram_quantile(0.95, sum by (le, model) (rate(octavo_x_bucket{model=~"$model"}[5m]))) > 1'
    assert names_in(nested) == {"octavo_x_bucket"}
    assert names_in("octavo_a > 0 and deriv(octavo_b[10m]) > 0") == {"octavo_a", "octavo_b"}
    assert not {"octavo_x_bucket"} <= BY_SAMPLE.keys()


def test_names_are_unique_and_follow_the_style() -> None:
    assert [name for name, count in Counter(metric.name for metric in METRICS).items() if count > 1] == []
    for metric in METRICS:
        assert re.fullmatch(r"octavo_[a-z0-9_]+", metric.name)
        assert metric.help.endswith(".") or metric.help.endswith(")")
        assert "|" not in metric.help  # it would end a cell of the documentation's table


def test_every_metric_is_documented_and_the_page_is_fresh() -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert [metric.name for metric in METRICS if f"| `{metric.name}` |" not in page] == []
    subprocess.run([sys.executable, str(ROOT / "tools/gen_metrics_docs.py"), "--check"], check=True, cwd=ROOT)


def test_every_rule_says_how_bad_it_is_and_what_it_means() -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"].endswith(".")


def test_what_prometheus_and_grafana_load_fits_together() -> None:
    prometheus = read_yaml("deploy/prometheus/prometheus.yml")
    assert [(ROOT / "deploy/prometheus" / name).exists() for name in prometheus["rule_files"]] == [True]
    jobs = {job["job_name"] for job in prometheus["scrape_configs"]}
    assert jobs == {"octavo-router", "octavo-scheduler", "octavo-worker"}
    scraped = {name for job in prometheus["scrape_configs"] for dns in job["dns_sd_configs"] for name in dns["names"]}
    services = read_yaml("compose.yaml")["services"]
    assert scraped == {name for name, service in services.items() if "build" in service}
    (source,) = read_yaml("deploy/grafana/provisioning/datasources/prometheus.yml")["datasources"]
    used = {panel["datasource"]["uid"] for panel in panels(dashboard()["panels"]) if "datasource" in panel}
    assert used == {source["uid"]}
    (provider,) = read_yaml("deploy/grafana/provisioning/dashboards/octavo.yml")["providers"]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels(dashboard()["panels"]):
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
