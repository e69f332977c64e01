"""`octavo bench` as it is typed, against a real router over a fake scheduler in another thread."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.bench.options import BenchConfig
from octavo.bench.processes import ServerWatch, cpu_seconds, memory_bytes, server_root, tree_of
from octavo.bench.progress import Progress
from octavo.bench.records import Answer, Record
from octavo.bench.report import read_report
from octavo.cli import main
from octavo.options import OptionError
from tests.fakes.router_stack import stack, write_text_model

OUTPUT = 6


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[tuple[str, str]]:
    """(gRPC address, HTTP URL) of a router that answers every request with OUTPUT - 1 letters and an end token."""
    found: list[tuple[str, str]] = []
    is_up, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def run() -> None:
        async with stack(directory) as made:
            made.say("x" * (OUTPUT - 1))
            found.append((made.grpc_address, made.base_url))
            is_up.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    try:
        assert is_up.wait(20)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        loop.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    with serving(write_text_model(tmp_path_factory.mktemp("bench") / "m")) as addresses:
        yield addresses


def test_a_sweep_over_grpc_writes_table_file_and_picture(
    server: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--concurrency", "1,3", "--num-requests", "6", "--repeats", "2", "--prompt-tokens", "uniform:5:9"]
    words += ["--output-tokens", str(OUTPUT), "--slo", "e2e=60000", "--salt-cache"]
    files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.svg")]
    assert main(["bench", server[0], *words, *files]) == 0
    told = capsys.readouterr().out
    assert "made-up prompts of uniform:5:9 tokens" in told
    assert "3 at once" in told
    report = read_report(tmp_path / "a.json")
    assert [str(point.load) for point in report.points] == ["1 at once", "3 at once"]
    for point in report.points:
        assert [(run.num_complete, run.num_output_tokens) for run in point.runs] == [(6, 6 * OUTPUT)] * 2
        assert [run.slo_share for run in point.runs] == [1.0, 1.0]
        assert all(5 * 6 <= run.num_prompt_tokens <= 9 * 6 for run in point.runs)
        assert all(0 < run.ttft_ms.p50 <= run.ttft_ms.p99 <= run.e2e_ms.longest for run in point.runs)
    assert report.target == f"grpc://{server[0]}"
    assert "--repeats 2 (default 1)" in report.options
    assert (tmp_path / "a.svg").read_text().startswith("<svg")


def test_an_open_loop_of_chats_over_http_from_a_file_of_answers(
    server: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "p.json"
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "x" * OUTPUT}]
    prompts.write_text(
        json.dumps([{"conversations": turns}, {"conversations": turns[1:]}, {"conversations": turns[:1]}])
    )
    words = ["--endpoint", "chat", "--request-rate", "200", "--num-requests", "8", "--prompts", str(prompts)]
    path = tmp_path / "a.json"
    assert main(["bench", f"{server[1]}/v1", *words, "--output-tokens", "answer", "--json", str(path)]) == 0
    assert "200/s" in capsys.readouterr().out
    (run,) = read_report(path).points[0].runs
    assert (run.num_complete, run.num_output_tokens) == (8, 8 * OUTPUT)


def test_a_trace_and_chats_of_made_up_text(server: tuple[str, str], tmp_path: Path) -> None:
    trace, path = tmp_path / "t.jsonl", tmp_path / "a.json"
    lines = [{"at_s": 5 + n, "prompt_tokens": 4 + n, "output_tokens": OUTPUT} for n in range(3)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    words = ["--trace", str(trace), "--trace-speed", "100", "--json", str(path)]
    assert main(["bench", f"grpc://{server[0]}", *words]) == 0
    (run,) = read_report(path).points[0].runs
    assert (run.num_complete, run.num_prompt_tokens) == (3, 4 + 5 + 6)
    assert run.seconds < 5
    assert main(["bench", server[0], "--endpoint", "chat", "--num-requests", "2", "--prompt-tokens", "9"]) == 0


def test_the_limit_is_searched_for(server: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", server[0], "--num-requests", "4", "--prompt-tokens", "4", "--output-tokens", str(OUTPUT)]
    assert main([*words, "--find-limit", "concurrency", "--slo", "e2e=60000", "--most-load", "4"]) == 0
    told = capsys.readouterr().out
    assert "up to 4 requests at once keep 95% of requests within E2E 60000 ms" in told
    assert main([*words, "--find-limit", "concurrency", "--slo", "ttft=0.0001"]) == 1
    assert "not even concurrency 1 keeps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["127.0.0.1:1"], "grpc://127.0.0.1:1: UNAVAILABLE"),
        (["http://127.0.0.1:1"], "http://127.0.0.1:1: connection"),
        (["ftp://x"], "is no URL"),
        (["127.0.0.1:1", "--extra-body", '{"a": 1}'], "--extra-body is for HTTP"),
        (["https://127.0.0.1:1", "--tls-ca", "/none"], "No such file"),
    ],
)
def test_who_cannot_be_asked_is_said(words: list[str], answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 1
    assert answer in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--concurrency", "1,x"], "--concurrency 1,x: must be numbers"),
        (["--concurrency", "1.5"], "--concurrency 1.5: must be a whole number"),
        (["--request-rate", "0"], "--request-rate 0: must be numbers above 0"),
        (["--slo", "speed=1"], "--slo speed=1: 'speed=1' is no limit"),
        (["--find-limit", "rate"], "needs --slo"),
        (["--prompt-tokens", "many"], "--prompt-tokens many"),
        (["--output-tokens", "answer"], "needs --prompts"),
        (["--extra-body", "[]"], "is no JSON object"),
        (["--prompts", "/none"], "--prompts /none"),
        (["--trace", "/none", "--request-rate", "1"], "is a load of its own, beside --request-rate"),
        (["--trace", "/none", "--prompts", "/none"], "--prompts is given too"),
        (["--max-num-seqs", "3"], "it is an option of `octavo"),
    ],
)
def test_bad_options_end_the_command_with_2(words: list[str], answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *words])
    assert caught.value.code == 2
    assert answer in capsys.readouterr().err


def test_the_number_of_requests_follows_the_load() -> None:
    config = BenchConfig(concurrency="1,64", duration=10)
    assert [config.num_requests_at(load) for load in config.loads] == [16, 256]
    rates = BenchConfig(request_rate="0.5,20", duration=10)
    assert [rates.num_requests_at(load) for load in rates.loads] == [16, 200]
    with pytest.raises(OptionError, match="--num-requests"):
        BenchConfig(num_requests=0)


def test_a_servers_processes_are_found_and_measured() -> None:
    code = "import socket, sys, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)"
    # A supervisor of the same program, whose child listens.
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code + '; sys.stdin.read()'!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        assert server_root("127.0.0.1", port) == process.pid
        assert server_root("192.0.2.1", port) is None
        assert len(tree_of(process.pid)) == 2
        assert all((memory_bytes(pid) or 0) > 2**20 for pid in tree_of(process.pid))

        async def watch() -> ServerWatch:
            found = ServerWatch(process.pid)
            async with found.watching():
                await asyncio.sleep(0)
            assert (use := found.use()) is not None
            assert (set(use.pids), use.cores >= 0) == (set(tree_of(process.pid)), True)
            assert use.peak_memory_bytes > 2**21
            return found

        asyncio.run(watch())
    finally:
        process.communicate("")
    assert process.returncode == 0
    assert cpu_seconds(os.getpid()) is not None


def test_progress_is_one_line_on_a_terminal_and_nothing_elsewhere() -> None:
    class Terminal:
        written = ""

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            self.written += text
            return len(text)

        def flush(self) -> None:
            pass

    now = 0.0
    terminal = Terminal()
    progress = Progress(terminal, lambda: now)  # type: ignore[arg-type]
    progress.begin("8 at once", 2)
    now = 2.0
    progress.note(Record(due_s=0.0, answer=Answer(1, 10)))
    now = 2.01  # too soon to be shown
    progress.note(Record(due_s=0.0, error_kind="cut"))
    progress.end()
    assert "8 at once [############............] 1/2  5 tok/s  2 s" in terminal.written
    assert "2/2" not in terminal.written
    assert "\n" not in terminal.written
    terminal.isatty = lambda: False  # type: ignore[method-assign]
    terminal.written = ""
    silent = Progress(terminal, lambda: now)  # type: ignore[arg-type]
    silent.begin("x", 1)
    silent.end()
    assert terminal.written == ""
