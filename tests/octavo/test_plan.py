"""`octavo plan`: workloads, the search for replicas, and what is printed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from random import Random

import pytest

from octavo.cli import main
from octavo.commands.plan import Expectation, meets_target, replica_spec, search, simulate, workload
from octavo.commands.planning import PlanConfig
from octavo.cost_model import CostModel
from octavo.options import OptionError
from octavo.percentiles import percentile
from octavo.workload import Entry, parse_sizes, read_entries
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.measures import SequenceTimes, Summary, summarize
from scheduler_svc.workload import arrivals

COSTS = CostModel(prefill_tokens_per_s=1000, step_ms=10, row_us=0, kv_token_ns=0)


def expectation(config: PlanConfig, num_replicas: int = 1, costs: CostModel = COSTS) -> Expectation:
    coming = arrivals(workload(config), config.max_model_len)
    return simulate(coming, replica_spec(config), num_replicas, CoreLimits(), costs)


def test_one_request_takes_what_its_steps_cost() -> None:
    config = PlanConfig(num_requests=1, prompt_tokens="500", output_tokens="11", max_num_batched_tokens=500)
    found = expectation(config)
    assert found.summary.ttft_mean_ms == pytest.approx(10 + 500)
    assert found.summary.tpot_mean_ms == pytest.approx(10)
    assert found.summary.num_complete == 1
    assert found.summary.output_tokens_per_s == pytest.approx(11 / (0.510 + 10 * 0.010))
    assert not found.is_behind


def test_shared_prefixes_are_found_cached() -> None:
    config = PlanConfig(num_requests=20, request_rate=1, prompt_tokens="500", output_tokens="2", num_prefixes=1)
    summary = expectation(config).summary
    assert summary.cached_share == pytest.approx(19 * 256 / (20 * 500))
    distinct = expectation(PlanConfig(num_requests=20, request_rate=1, prompt_tokens="500", output_tokens="2"))
    assert distinct.summary.cached_share == 0
    assert summary.ttft_mean_ms < distinct.summary.ttft_mean_ms


def test_a_replica_that_falls_behind_is_noticed_and_more_keep_up() -> None:
    # A prompt takes half a second and three come in one.
    config = PlanConfig(num_requests=60, request_rate=3, prompt_tokens="500", output_tokens="40", target_ttft_ms=3000)
    assert expectation(config).is_behind
    tried, chosen = search(lambda number: expectation(config, number), config)
    assert chosen is not None
    assert chosen.num_replicas in (2, 3)
    assert chosen.summary.ttft_p95_ms <= 3000
    before = next(each for each in tried if each.num_replicas == chosen.num_replicas - 1)
    assert not meets_target(before, config)


@pytest.mark.parametrize("needed", [1, 2, 3, 5, 8, 9, 20])
def test_the_search_finds_the_least_number(needed: int) -> None:
    config = PlanConfig(target_ttft_ms=1, max_replicas=20)
    calls: list[int] = []

    def expect(number: int) -> Expectation:
        calls.append(number)
        times = [SequenceTimes(0, first_token_ns=0 if number >= needed else 10**9, ended_ns=10**9)]
        return Expectation(number, summarize(times), 1.0, 0.0, is_behind=False)

    tried, chosen = search(expect, config)
    assert chosen is not None
    assert chosen.num_replicas == needed
    assert len(calls) == len(set(calls)) <= 10
    assert [each.num_replicas for each in tried] == sorted(calls)
    tried, chosen = search(expect, PlanConfig(target_ttft_ms=1, max_replicas=needed - 1 or 1, replicas=None))
    assert (chosen is None) == (needed > 1)


def test_percentiles_are_of_the_values_there_are() -> None:
    assert percentile([], 0.5) == 0
    assert percentile([1, 2, 3, 4], 0.5) == 2
    assert percentile([1, 2, 3, 4], 0.95) == 4
    assert percentile([7], 0.01) == 7


def test_lengths_are_drawn_as_described() -> None:
    random = Random(1)
    assert parse_sizes("512").draw(random) == 512
    drawn = [parse_sizes("uniform:10:20").draw(random) for _ in range(200)]
    assert (min(drawn), max(drawn)) == (10, 20)
    drawn = [parse_sizes("exponential:100").draw(random) for _ in range(4000)]
    assert 90 < sum(drawn) / len(drawn) < 110
    drawn = sorted(parse_sizes("lognormal:100:1").draw(random) for _ in range(4000))
    assert 90 < drawn[2000] < 110
    for text in ("", "0", "-3", "inf", "uniform:5", "uniform:9:3", "normal:3:4", "5:6", "lognormal:9:99"):
        with pytest.raises(ValueError, match=r"holds|none of"):
            parse_sizes(text)


def test_a_trace_is_read_line_by_line() -> None:
    lines = [
        '{"at_s": 0.5, "prompt_tokens": 40, "output_tokens": 9, "tenant": "a", "prefix": "x", "prefix_tokens": 32}',
        "",
        '{"at_s": 1, "prompt_tokens": 500, "output_tokens": 90, "priority": -1, "prefix": "x", "prefix_tokens": 32}',
    ]
    first, second = arrivals(read_entries(lines), max_model_len=100)
    assert (first.at_ns, second.at_ns) == (500_000_000, 10**9)
    assert (first.request.tenant, second.request.priority) == ("a", -1)
    assert (len(second.request.prompt_token_ids), second.num_output_tokens) == (99, 1)
    assert first.request.prompt_token_ids[:32] == second.request.prompt_token_ids[:32]
    assert first.request.prompt_token_ids[32:] != second.request.prompt_token_ids[32:40]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[]", "line 2: it holds a list"),
        ("{", "line 2"),
        ('{"at_s": 1}', "line 2: it lacks prompt_tokens and output_tokens"),
        ('{"at_s": NaN, "prompt_tokens": 1, "output_tokens": 1}', "line 2: at_s is nan"),
        ('{"at_s": 1e300, "prompt_tokens": 1, "output_tokens": 1}', r"line 2: at_s is 1e\+300; .* below 1e\+09"),
        ('{"at_s": -1, "prompt_tokens": 1, "output_tokens": 1}', "line 2: at_s is -1"),
        ('{"at_s": "x", "prompt_tokens": 1, "output_tokens": 1}', "line 2: at_s is 'x'"),
        ('{"at_s": 1, "prompt_tokens": true, "output_tokens": 1}', "line 2: prompt_tokens is True"),
        ('{"at_s": 1, "prompt_tokens": 0, "output_tokens": 1}', "line 2: prompt_tokens is 0"),
        ('{"at_s": 1, "prompt_tokens": 1, "output_tokens": 1, "speed": 1}', "line 2: 'speed' is none of at_s, "),
    ],
)
def test_a_bad_line_is_named(line: str, words: str) -> None:
    good = json.dumps({"at_s": 0, "prompt_tokens": 1, "output_tokens": 1})
    with pytest.raises(ValueError, match=words):
        read_entries([good, line])
    with pytest.raises(ValueError, match="no request"):
        read_entries([])


def test_a_trace_may_be_in_any_order() -> None:
    lines = [json.dumps({"at_s": at_s, "prompt_tokens": 1, "output_tokens": 1}) for at_s in (5, 1, 3.5)]
    assert [entry.at_s for entry in read_entries(lines)] == [1, 3.5, 5]


def test_what_is_cut_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f'{{"at_s": 0, "prompt_tokens": {num}, "output_tokens": 1}}\n' for num in (9, 63, 64)))
    assert main(["plan", "--trace", str(trace), "--max-model-len", "64"]) == 0
    told = capsys.readouterr().out
    assert "1 of them cut to the longest sequence, 64 tokens" in told
    assert "3 requests at once" in told
    assert main(["plan", "--trace", str(trace), "--max-model-len", "65"]) == 0
    assert "cut" not in capsys.readouterr().out


def test_entries_keep_room_for_output() -> None:
    (arrival,) = arrivals([Entry(0, 1000, 1000)], max_model_len=64)
    assert (len(arrival.request.prompt_token_ids), arrival.request.max_tokens) == (63, 1)


def test_the_command_prints_tables_and_a_verdict(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["plan", "--num-requests", "20", "--output-tokens", "8"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "workload  20 requests" in told
    assert "TTFT p95, ms" in told
    assert main([*words, "--target-tpot-ms", "1000", "--scheduling-policy", "fcfs"]) == 0
    assert capsys.readouterr().out.endswith("1 replica meets the target: TPOT p95 of 1000 ms\n")
    assert main([*words, "--target-ttft-ms", "0.01", "--max-replicas", "2"]) == 1
    assert "not even 2 replicas meet the target" in capsys.readouterr().out
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"at_s": 0, "prompt_tokens": 10, "output_tokens": 5}\n')
    assert main(["plan", "--trace", str(trace)]) == 0
    assert "workload  1 requests" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--trace", "/nonexistent"],
            "--trace /nonexistent: it cannot be read (No such file or directory). Name a file",
        ),
        (["--trace", "/"], "--trace /: it cannot be read (Is a directory). Name a file"),
        (["--prompt-tokens", "many"], "--prompt-tokens many"),
        (["--costs", "speed=1"], "--costs speed=1"),
        (["--kv-cache-memory", "1MiB", "--costs", "kv_bytes=1e9"], "holds no block"),
        (["--dtype", "float32"], "--dtype has no effect in `octavo plan`"),
    ],
)
def test_bad_options_are_answered(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *options])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_a_trace_that_is_no_text_is_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace"
    trace.write_bytes(b"\xff\x00")
    with pytest.raises(SystemExit):
        main(["plan", "--trace", str(trace)])
    assert "it is no text in UTF-8. Write one JSON object a line" in capsys.readouterr().err


def test_why_requests_are_refused_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--num-requests", "5", "--num-kv-blocks", "4"]) == 0
    told = capsys.readouterr().out
    assert "1 replica: 5 requests were refused; the first was too long" in told
    assert "give the worker more KV memory" in told


def test_the_help_tells_every_cost_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(CostModel):
        if field.name != "output_tokens":  # whoever plans says how long answers are
            assert f"{field.name} (" in told
            assert f"; {field.default:g})" in told
    assert "(default: )" not in told


def test_a_summary_of_nothing_is_zero() -> None:
    assert summarize([]) == Summary(0, 0, 0, 0, 1e-9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    with pytest.raises(OptionError, match="--num-requests"):
        PlanConfig(num_requests=0)
