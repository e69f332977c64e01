"""`octavo chat` and `octavo generate`, in this process, with the streams a terminal would give them."""

from __future__ import annotations

import argparse
import asyncio
import io
from pathlib import Path

import pytest

from octavo import chat
from tests.fakes.router_stack import TURN, Stack, in_loop, stack
from tests.router.chat_models import write_thinking_model


def run(name: str, *words: str) -> int:
    parser = argparse.ArgumentParser(prog=f"octavo {name}", allow_abbrev=False)
    chat.add_parser(parser, name)
    return chat.main(name, parser.parse_args(words))


def prompts(made: Stack) -> list[str]:
    found = [made.tokenizer.decode(r.prompt_token_ids, skip_special_tokens=False) for r in made.scheduler.requests]
    return [text.replace(TURN, "@") for text in found]


@in_loop
async def test_a_conversation(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["one", "/what", "two", "/reset", "three", "/system Be brief.", "four", "/help", "/quit", "never"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    async with stack(model_dir) as made:
        made.say("yes")
        assert await asyncio.to_thread(run, "chat", "--server", made.grpc_address, "--max-tokens", "9") == 0
        assert prompts(made) == [
            "@user: one\n@assistant:",
            "@user: one\n@assistant: yes\n@user: two\n@assistant:",
            "@user: three\n@assistant:",
            "@system: Be brief.\n@user: four\n@assistant:",
        ]
        assert {request.sampling.max_tokens for request in made.scheduler.requests} == {9}
        # A chat does not sample from the whole distribution unless told to.
        assert {round(request.sampling.temperature, 3) for request in made.scheduler.requests} == {0.2}
        assert {round(request.sampling.top_p, 3) for request in made.scheduler.requests} == {0.9}
    shown = capsys.readouterr()
    assert shown.out == "yes\n" * 4
    assert "no command /what" in shown.err


@in_loop
async def test_one_message(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with stack(model_dir) as made:
        made.say("yes")
        words = ("--server", made.grpc_address, "--message", "ok?", "--system", "s", "--temperature", "0")
        assert await asyncio.to_thread(run, "chat", *words) == 0
        assert prompts(made) == ["@system: s\n@user: ok?\n@assistant:"]
    assert capsys.readouterr().out == "yes\n"


@in_loop
async def test_generate_from_standard_input(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Once"))
    async with stack(model_dir) as made:
        made.say(" upon a time")
        words = ("-", "--server", made.grpc_address, "--stop", "a t", "--seed", "3")
        assert await asyncio.to_thread(run, "generate", *words) == 0
        assert prompts(made) == ["Once"]
        assert made.scheduler.requests[0].sampling.temperature == 1
    assert capsys.readouterr().out == " upon \n"


@in_loop
async def test_a_refusal_is_said_and_the_status_tells(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with stack(model_dir) as made:
        assert (
            await asyncio.to_thread(run, "generate", "x", "--server", made.grpc_address, "--max-tokens", "100000") == 1
        )
    assert "max_tokens" in capsys.readouterr().err


def test_what_no_server_takes_is_refused_before_one_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("chat", "--server", "127.0.0.1:1", "--top-p", "0")
    assert "--top-p: 0: must be above 0 and at most 1" in capsys.readouterr().err


def test_no_server_names_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "x", "--server", "127.0.0.1:1") == 1
    assert "octavo serve" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_not_the_chat(capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted:
        cancelled = False

        def __iter__(self) -> Interrupted:
            return self

        def __next__(self) -> object:
            raise KeyboardInterrupt

        def cancel(self) -> None:
            self.cancelled = True

    stream = Interrupted()
    assert chat._write(stream, io.StringIO()) is None  # type: ignore[arg-type]
    assert stream.cancelled
    assert "stopped" in capsys.readouterr().err


@in_loop
async def test_thinking_is_shown_beside_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with stack(write_thinking_model(tmp_path)) as made:
        made.say("hm, hm</think>yes")
        assert await asyncio.to_thread(run, "chat", "--server", made.grpc_address, "--message", "ok?") == 0
    shown = capsys.readouterr()
    assert shown.out == "yes\n"
    assert "hm, hm\n" in shown.err
