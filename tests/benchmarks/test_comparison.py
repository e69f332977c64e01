"""The comparison's arithmetic: ratios against the better peer, what counts in them, and whose load is whose."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.comparison.client import Measurement
from benchmarks.comparison.contenders import Absent, Variants, find_contenders
from benchmarks.comparison.load import NotQuietError, own_busy_s, wait_until_quiet
from benchmarks.comparison.report import Report, Run, markdown, ratios
from benchmarks.comparison.workloads import WORKLOADS

MACHINE = {
    "cpu": "A CPU",
    "num_cpus": 2,
    "memory_gib": 4.0,
    "system": "Linux",
    "vector_flags": ["avx2"],
    "python": "3.11",
    "torch": "2.13",
}


def measured(tokens_per_s: float, ttft_ms: float, num_failed: int = 0, others_cores: float = 0.0) -> Measurement:
    return Measurement(8, num_failed, tokens_per_s, ttft_ms, ttft_ms, 10.0, 12.0, 1.0, others_cores)


def report(*runs: Run) -> Report:
    return Report("today", MACHINE, 1.0, True, ["c1", "c32"], list(runs))


def run(name: str, kind: str, **found: Measurement) -> Run:
    return Run(name, kind, "1", name, 1.0, dict(found))


def test_the_better_peer_of_each_workload_and_metric_is_one() -> None:
    found = ratios(
        report(
            run("octavo float32", "octavo", c1=measured(90, 30), c32=measured(600, 700)),
            run("vllm float32", "vllm", c1=measured(30, 20), c32=measured(400, 2000)),
            run("vllm bfloat16", "vllm", c1=measured(20, 60), c32=measured(100, 9000)),
            run("llama.cpp f16", "llama", c1=measured(60, 40), c32=measured(300, 1000)),
        )
    )
    assert found["Output tokens/s"] == {"c1": pytest.approx(1.5), "c32": pytest.approx(1.5)}
    assert found["Mean TTFT, ms"] == {"c1": pytest.approx(1.5), "c32": pytest.approx(0.7)}


def test_a_run_with_failed_requests_counts_in_no_ratio() -> None:
    whole = report(
        run("octavo float32", "octavo", c1=measured(90, 30)),
        run("vllm float32", "vllm", c1=measured(900, 1, num_failed=3)),
        run("llama.cpp f16", "llama", c1=measured(60, 40)),
    )
    assert ratios(whole)["Output tokens/s"]["c1"] == pytest.approx(1.5)
    assert "vllm float32, c1: 3 requests failed" in markdown(whole)


def test_without_peers_there_is_no_ratio_and_a_disturbed_figure_is_marked() -> None:
    alone = report(run("octavo float32", "octavo", c1=measured(90, 30, others_cores=0.5)))
    assert ratios(alone)["Output tokens/s"] == {"c1": None, "c32": None}
    text = markdown(alone)
    assert "90.0*" in text
    assert "other processes kept 0.50 cores busy" in text


def test_a_trial_sends_at_least_as_many_requests_as_run_at_once() -> None:
    arguments = WORKLOADS["c32"].arguments(0.01)
    assert arguments[arguments.index("--num-prompts") + 1] == "32"
    whole = WORKLOADS["c32"].arguments(1.0)
    assert whole[whole.index("--num-prompts") + 1] == "128"
    assert len({each.seed for each in WORKLOADS.values()}) == len(WORKLOADS)


def test_peers_that_are_not_there_are_named_with_the_file_missing(tmp_path: Path) -> None:
    variants = Variants(("float32",), ("float32",), ("auto",), ("f16",))
    found = list(find_contenders(tmp_path, ("octavo", "vllm", "llama"), variants))
    assert all(isinstance(each, Absent) for each in found)
    assert [each.name for each in found] == ["octavo float32", "vllm float32", "llama.cpp f16"]
    assert all(str(tmp_path) in each.reason for each in found if isinstance(each, Absent))


def test_own_time_counts_this_process_and_its_children_alive_or_ended() -> None:
    burn = "import os, sys\nwhile os.times().user < 0.2: pass\nprint(flush=True)\nsys.stdin.read()"
    before = own_busy_s()
    while own_busy_s() - before < 0.1:
        sum(range(10_000))
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        alive = own_busy_s()
    assert alive - before >= 0.28
    assert own_busy_s() >= alive


def test_a_machine_that_stays_busy_is_refused_with_its_load() -> None:
    with pytest.raises(NotQuietError, match="cores busy"):
        wait_until_quiet(most_cores=-1.0, timeout_s=0.0, interval_s=0.01)
