"""Text as clients get it, on both surfaces: split characters, leading blanks, stop strings, logprobs, usage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.client import AsyncClient
from tests.fakes.router_stack import Stack, in_loop, stack, write_text_model
from tests.fakes.scheduler import speak

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def events(made: Stack, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a streamed answer; checks the frame around them."""
    answer = await made.http.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def both_ways(made: Stack, body: dict[str, Any]) -> dict[str, Any]:
    """The choice of a completions request, after checking that streaming and gRPC say the same."""
    whole = (await made.http.post("/v1/completions", json=body)).json()["choices"][0]
    chunks = [chunk["choices"][0] for chunk in await events(made, "/v1/completions", body)]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == [whole["finish_reason"]]
    async with AsyncClient(made.grpc_address) as client:
        options = {name: value for name, value in body.items() if name != "prompt"}
        result = await client.generate(body["prompt"], **options)
    assert (result.text, result.choices[0].finish_reason) == (whole["text"], whole["finish_reason"])
    found: dict[str, Any] = whole
    return found


@in_loop
async def test_f02_a_token_prompt_that_ends_inside_a_character_never_shows(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        ids = made.ids("SECRET-PREFIX 🌶")
        made.scheduler.behave = speak([*ids[-1:], *made.ids(" ok")])
        choice = await both_ways(made, {"prompt": ids[:-1], "max_tokens": 8})
        assert choice["text"] == "🌶 ok"
        made.scheduler.behave = speak(made.ids("x"))
        assert (await both_ways(made, {"prompt": ids[:-1], "max_tokens": 8}))["text"] == "x"


@pytest.mark.parametrize(
    ("style", "pieces", "prompt", "expected"),
    [
        ("byte_fallback", [" leading", " x"], "Answer:", " leading x"),
        ("byte_level", [" a", " b"], "Answer:", " a b"),
    ],
)
@in_loop
async def test_f04_blanks_at_the_start_of_the_output_stay(
    tmp_path: Path, style: Any, pieces: list[str], prompt: str, expected: str
) -> None:
    async with stack(write_text_model(tmp_path, pieces, style)) as made:
        first = made.tokenizer.vocab_size - len(pieces)
        made.scheduler.behave = speak(range(first, first + len(pieces)))
        assert (await both_ways(made, {"prompt": prompt, "max_tokens": 8}))["text"] == expected


@in_loop
async def test_f06_a_stop_inside_a_token_cuts_at_the_character(tmp_path: Path) -> None:
    async with stack(write_text_model(tmp_path, ["now stop! ", "more"])) as made:
        first = made.tokenizer.vocab_size - 2
        made.scheduler.behave = speak([first, first + 1])
        choice = await both_ways(made, {"prompt": "x", "stop": ["stop"]})
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("now ", "stop", "stop")


@in_loop
async def test_f06_a_stop_at_the_first_character_leaves_nothing_but_a_finish(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("Ready")
        answer = (await made.http.post("/v1/chat/completions", json={**CHAT, "stop": "R"})).json()
        assert answer["choices"][0]["message"]["content"] == ""
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 1
        chunks = await events(made, "/v1/chat/completions", {**CHAT, "stop": "R"})
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "stop"]


@pytest.mark.parametrize("stop", ["", [""], ["a", ""]])
@in_loop
async def test_f06_an_empty_stop_is_refused(model_dir: Path, stop: Any) -> None:
    async with stack(model_dir) as made:
        answer = await made.http.post("/v1/completions", json={"prompt": "x", "stop": stop})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("stop")
        assert made.scheduler.requests == []


@in_loop
async def test_a_stop_that_may_still_come_is_held_back_and_then_shown(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("abc STO")
        choice = await both_ways(made, {"prompt": "x", "stop": ["STOP"], "max_tokens": 20})
        assert (choice["text"], choice["finish_reason"]) == ("abc STO", "stop")
        assert choice["stop_reason"] is None


@in_loop
async def test_stop_tokens_and_the_limit_are_reported(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("ab.cd")
        dot = made.ids(".")[0]
        choice = await both_ways(made, {"prompt": "x", "stop_token_ids": [dot]})
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", dot)
        choice = await both_ways(made, {"prompt": "x", "max_tokens": 4})
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab.c", "length", None)


@in_loop
async def test_f08_usage_comes_once_and_only_when_asked_for(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("hello")
        body = {**CHAT, "n": 2, "max_tokens": 5}
        for options in (None, {}, {"include_usage": False}):
            chunks = await events(made, "/v1/chat/completions", {**body, "stream_options": options})
            assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)
        chunks = await events(made, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 10
        choices = [chunk["choices"][0] for chunk in chunks[:-1]]
        for index in (0, 1):
            own = [choice for choice in choices if choice["index"] == index]
            assert [choice["delta"].get("role") for choice in own].count("assistant") == 1
            assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["length"]
        answer = await made.http.post("/v1/chat/completions", json={**body, "stream_options": {"include_usage": True}})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options")


@in_loop
async def test_f16_chat_logprobs_carry_raw_bytes(model_dir: Path) -> None:
    text = "a 👩‍🚀"
    async with stack(model_dir) as made:
        made.say(text)
        for top, expected in ((None, 0), (0, 0), (2, 2), (20, 20)):
            body = {**CHAT, "logprobs": True, "top_logprobs": top}
            choice = (await made.http.post("/v1/chat/completions", json=body)).json()["choices"][0]
            content = choice["logprobs"]["content"]
            assert bytes(value for entry in content for value in entry["bytes"]) == text.encode()
            assert {len(entry["top_logprobs"]) for entry in content} == {expected}
            assert len(content) == len(made.ids(text))
            chunks = await events(made, "/v1/chat/completions", body)
            streamed = [
                entry
                for chunk in chunks
                if (found := chunk["choices"][0]["logprobs"]) is not None
                for entry in found["content"]
            ]
            assert streamed == content
        for bad in ({"top_logprobs": 21, "logprobs": True}, {"top_logprobs": 2}):
            answer = await made.http.post("/v1/chat/completions", json={**CHAT, **bad})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_logprobs")


@in_loop
async def test_completions_logprobs_and_echo(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("ok")
        body = {"prompt": "abc", "echo": True, "logprobs": 1}
        choice = (await made.http.post("/v1/completions", json=body)).json()["choices"][0]
        assert choice["text"] == "abcok"
        found = choice["logprobs"]
        assert found["tokens"] == ["a", "b", "c", "o", "k"]
        assert found["text_offset"] == [0, 1, 2, 3, 4]
        assert found["token_logprobs"] == [None, -1.0, -1.0, -0.5, -0.5]
        assert found["top_logprobs"][0] is None
        assert "prompt_logprobs" not in choice
        chunks = [chunk["choices"][0] for chunk in await events(made, "/v1/completions", body)]
        assert "".join(chunk["text"] for chunk in chunks) == "abcok"
        offsets = [o for chunk in chunks if chunk["logprobs"] for o in chunk["logprobs"]["text_offset"]]
        assert offsets == [0, 1, 2, 3, 4]
        ids = made.ids("abc")
        choice = (await made.http.post("/v1/completions", json={"prompt": ids, "echo": True})).json()["choices"][0]
        assert choice["text"] == "abcok"
        assert choice["logprobs"] is None


@in_loop
async def test_prompt_logprobs(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("ok")
        body = {"prompt": ["abc", "d"], "prompt_logprobs": 2, "n": 2}
        choices = (await made.http.post("/v1/completions", json=body)).json()["choices"]
        first = choices[0]["prompt_logprobs"]
        assert first[0] is None
        assert list(first[1]) == [str(made.ids("b")[0]), str(made.ids("b")[0] + 1)]
        assert choices[1]["prompt_logprobs"] == first
        assert choices[2]["prompt_logprobs"] == [None]
        asked = [request.sampling.HasField("num_prompt_logprobs") for request in made.scheduler.requests]
        assert asked.count(True) == 1  # once for the prompt that has positions to report
        answer = await made.http.post("/v1/completions", json={**body, "stream": True})
        assert answer.status_code == 400


@in_loop
async def test_f10_a_seed_belongs_to_the_request(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("ok")
        for _ in range(2):
            await made.http.post("/v1/completions", json={"prompt": "a", "seed": 42, "n": 3})
        await made.http.post("/v1/completions", json={"prompt": "a", "seed": 42})
        await made.http.post("/v1/completions", json={"prompt": "a"})
        seeds = [request.sampling.seed for request in made.scheduler.requests]
        assert set(seeds[:3]) == set(seeds[3:6])
        assert len(set(seeds[:3])) == 3
        assert seeds[6] == 42 in seeds[:3]
        assert seeds[7] != 42
