"""Results: the table, the file, the picture, the comparison of two, and the search for a limit."""

from __future__ import annotations

import asyncio
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.bench.compare import compare, lines, parse_share, too_bad, unequal
from octavo.bench.load import Load
from octavo.bench.plot import nice_top, svg
from octavo.bench.processes import ServerUse
from octavo.bench.report import Limit, Point, Report, read_report, table
from octavo.bench.search import find_limit
from octavo.bench.statistics import Latency, Summary
from octavo.cli import main


def summary(tokens_per_s: float = 100.0, ttft_ms: float = 50.0, **changes: object) -> Summary:
    flat = Latency(10.0, 10.0, 10.0, 10.0, 10.0)
    base = Summary(
        seconds=10.0,
        num_requests=20,
        num_complete=20,
        errors={},
        num_prompt_tokens=1000,
        num_output_tokens=1000,
        num_cached_tokens=0,
        requests_per_s=2.0,
        output_tokens_per_s=tokens_per_s,
        total_tokens_per_s=2 * tokens_per_s,
        slo_share=None,
        goodput_per_s=None,
        ttft_ms=replace(flat, p50=ttft_ms),
        tpot_ms=flat,
        itl_ms=flat,
        e2e_ms=flat,
        latest_send_ms=0.5,
        client_cores=0.1,
        server=None,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


EIGHT = Load("concurrency", 8)


def report(*runs: Summary, load: Load = EIGHT, **changes: object) -> Report:
    base = Report("today", "1", "grpc://x", "made up", (), "Linux", "", (Point(load, runs),))
    return replace(base, **changes)  # type: ignore[arg-type]


def test_the_table_shows_means_ranges_and_who_may_be_the_bottleneck() -> None:
    busy = summary(120, client_cores=0.95, server=ServerUse((1, 2), 3 << 20, 1.5))
    broken = summary(80, errors={"HTTP 429": 2}, num_complete=18, error_example="HTTP 429: full")
    shown = "\n".join(table([Point(Load("concurrency", 8), (busy, broken)), Point(Load("concurrency", 16), (broken,))]))
    assert "8 at once" in shown
    assert "100.0 (80.0–120.0)" in shown
    assert "failed at 8 at once: 2 HTTP 429; the first: HTTP 429: full" in shown
    assert "client CPU, of a core" in shown
    assert "at 8 at once the client kept 95% of a core busy" in shown
    assert "at 16 at once the client" not in shown
    assert "server memory, MiB" in shown
    assert "goodput" not in shown


def test_a_file_reads_back_as_it_was_written(tmp_path: Path) -> None:
    written = report(summary(server=ServerUse((7,), 5, 0.5)), summary(slo_share=0.5), limit=Limit("rate", None))
    path = tmp_path / "a.json"
    path.write_text(written.to_json(), encoding="utf-8")
    assert read_report(path) == written
    for content, words in (("{}", "'format' is missing"), ("[", "Expecting"), ('{"format": 99}', "its format is 99")):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=words):
            read_report(path)


def test_the_picture_is_an_svg_with_a_mark_a_load() -> None:
    points = [Point(Load("concurrency", n), (summary(10.0 * n, 5.0 * n),)) for n in (1, 2, 4)]
    root = ElementTree.fromstring(svg(points, "a < b"))
    circles = root.findall(".//{http://www.w3.org/2000/svg}circle")
    assert len(circles) == 3 * 2 * 2
    assert "4 at once: TTFT p99" in "".join(root.itertext())
    assert [nice_top(value) for value in (0, 0.7, 1, 1.01, 3, 51, 1000)] == [1, 1, 1, 2, 5, 100, 1000]
    with pytest.raises(ValueError, match="no point"):
        svg([], "")


def test_worse_is_less_throughput_or_more_latency() -> None:
    before, after = report(summary(100, 50)), report(summary(94, 40))
    by_key = {change.metric.key: change for change in compare(before, after)}
    assert by_key["output_tokens_per_s"].worse_by == pytest.approx(0.06)
    assert by_key["ttft_ms.p50"].worse_by == pytest.approx(-0.2)
    assert "goodput_per_s" not in by_key
    worse = too_bad(list(by_key.values()), 0.05)
    assert [change.metric.key for change in worse] == ["output_tokens_per_s"]
    assert any("-6.0%  worse" in line for line in lines(list(by_key.values()), 0.05))
    assert not too_bad(list(by_key.values()), 0.06 + 1e-9)


def test_repeats_that_overlap_are_marked_as_perhaps_chance() -> None:
    before, after = report(summary(100), summary(110)), report(summary(90), summary(104))
    change = compare(before, after)[0]
    assert (change.before, change.after, change.ranges_overlap) == (105, 97, True)
    assert not compare(before, report(summary(90), summary(99)))[0].ranges_overlap


def test_what_cannot_be_compared_is_said() -> None:
    other = report(summary(), load=Load("rate", 3), target="http://y")
    with pytest.raises(ValueError, match="no load in common: 8 at once and 3/s"):
        compare(report(summary()), other)
    assert unequal(report(summary()), other)[0] == "target differs: grpc://x | http://y"
    assert [parse_share(text) for text in ("5%", "0.05", "0")] == [0.05, 0.05, 0.0]
    with pytest.raises(ValueError, match="no share"):
        parse_share("-5%")


@pytest.mark.parametrize(
    ("after", "options", "status", "words"),
    [
        (summary(94), ["--fail-if-worse", "5%"], 1, "1 of 6 figures are worse by more than 5.0%"),
        (summary(96), ["--fail-if-worse", "5%"], 0, "0 of 6 figures"),
        (summary(94), [], 0, "-6.0%"),
        (
            summary(num_complete=19, errors={"cut": 1}),
            ["--fail-if-worse", "5%"],
            1,
            "more requests failed: 0.0% | 5.0%",
        ),
    ],
)
def test_the_exit_status_says_whether_it_got_worse(
    after: Summary, options: list[str], status: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, found in zip(paths, (report(summary()), report(after)), strict=True):
        path.write_text(found.to_json(), encoding="utf-8")
    assert main(["bench", "compare", *map(str, paths), *options]) == status
    assert words in capsys.readouterr().out


def test_a_result_that_is_none_ends_the_command_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(SystemExit) as caught:
        main(["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "none.json")])
    assert caught.value.code == 2
    assert "a.json is no result of octavo bench: 'format' is missing" in capsys.readouterr().err


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 8, 13, 63, 64, 100])
def test_the_limit_is_found_in_few_tries(limit: int) -> None:
    tried: list[float] = []

    async def is_met(value: float) -> bool:
        tried.append(value)
        return value <= limit

    found = asyncio.run(find_limit(is_met, 1.0, 64.0, in_whole_numbers=True, precision=0.0))
    assert found == (None if limit == 0 else min(limit, 64))
    assert len(tried) == len(set(tried)) <= 13
    assert all(value == int(value) for value in tried)


def test_a_rate_is_found_to_its_precision() -> None:
    async def is_met(value: float) -> bool:
        return value <= 5.3

    found = asyncio.run(find_limit(is_met, 1.0, 1000.0, in_whole_numbers=False, precision=0.05))
    assert found is not None
    assert 5.3 * 0.95 <= found <= 5.3
