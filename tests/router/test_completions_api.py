"""Completions and their neighbours over HTTP: ranking, echo, tokens, models, and what no served model can do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.fakes.router_stack import CONTEXT, MODEL, Stack, in_loop, stack
from tests.fakes.scheduler import END, Attempt, speak
from tests.router.test_chat_api import chunks

Json = dict[str, Any]


async def post(made: Stack, path: str = "/v1/completions", status: int = 200, **body: Any) -> Json:
    answer = await made.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    found: Json = answer.json()
    return found


async def refusal(made: Stack, path: str = "/v1/completions", status: int = 400, **body: Any) -> Json:
    error: Json = (await post(made, path, status, **body))["error"]
    return error


def speak_by_seed(made: Stack) -> None:
    """Let each sequence say one letter by its seed; the earlier in the alphabet, the likelier it is."""

    async def behave(attempt: Attempt) -> None:
        letter = "abcdefgh"[attempt.request.sampling.seed % 8]
        await attempt.scheduled()
        await attempt.tokens(0, made.ids(letter), logprob=-1.0 - ord(letter) + ord("a"))
        await attempt.tokens(1, (), END)
        await attempt.finished(1, END)

    made.scheduler.behave = behave


@in_loop
async def test_the_first_token_starts_the_answer_though_it_adds_no_text(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.scheduler.behave = speak([min(made.tokenizer.special_ids)] * 3)
        body: Json = {"prompt": "a", "max_tokens": 3, "ignore_eos": True}
        texts = [chunk["choices"][0]["text"] for chunk in await chunks(made, "/v1/completions", **body)]
        assert texts == ["", ""], "one for the first token, one for the end"


@in_loop
async def test_the_prompts_of_a_request_have_one_answer(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("ok")
        answer_id = (await post(made, prompt=["a", "b"]))["id"]
        assert re.fullmatch(r"cmpl-[0-9a-f]{24}", answer_id)


@in_loop
async def test_the_likeliest_of_best_of_are_the_answer(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        speak_by_seed(made)
        answer = await post(made, prompt="x", n=2, best_of=6, seed=3, return_metrics=True)
        assert len(made.scheduler.requests) == 6
        seeds = [request.sampling.seed for request in made.scheduler.requests]
        assert len(set(seeds)) == 6
        assert {request.group_size for request in made.scheduler.requests} == {6}
        said = sorted("abcdefgh"[seed % 8] for seed in seeds)
        assert [choice["text"] for choice in answer["choices"]] == said[:2]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert answer["choices"][0]["logprobs"] is None
        assert answer["usage"]["completion_tokens"] == 12
        wrap = [seed - 2**64 if seed >= 2**63 else seed for seed in seeds]
        assert all(choice["metrics"]["seed"] in wrap for choice in answer["choices"])

        shown = await post(made, prompt=["x", "y"], best_of=3, logprobs=0, seed=3)
        assert [choice["index"] for choice in shown["choices"]] == [0, 1]
        assert all(len(choice["logprobs"]["tokens"]) == 1 for choice in shown["choices"])

        error = await refusal(made, prompt="x", best_of=2, stream=True)
        assert error["param"] == "best_of"
        assert (await refusal(made, prompt="x", n=3, best_of=2))["param"] == "best_of"


@in_loop
async def test_echo_with_logprobs_covers_prompt_and_answer(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("cd")
        for prompt in ("ab", made.ids("ab")):
            (choice,) = (await post(made, prompt=prompt, echo=True, logprobs=1))["choices"]
            assert choice["text"] == "abcd"
            logprobs = choice["logprobs"]
            assert logprobs["tokens"] == ["a", "b", "c", "d"]
            assert logprobs["token_logprobs"][0] is None
            assert all(value is not None for value in logprobs["token_logprobs"][1:])
            assert logprobs["text_offset"] == [0, 1, 2, 3]
        parts = await chunks(made, "/v1/completions", prompt="ab", echo=True, logprobs=1)
        assert "".join(c["text"] for part in parts for c in part["choices"]) == "abcd"
        tokens = [t for part in parts for c in part["choices"] for t in (c["logprobs"] or {}).get("tokens", ())]
        assert tokens == ["a", "b", "c", "d"]


REFUSED: list[tuple[str, Any]] = [
    ("suffix", "end"),
    ("use_beam_search", True),
    ("length_penalty", 2),
    ("bad_words", ["a"]),
    ("allowed_token_ids", [1]),
    ("logits_processors", ["x"]),
    ("prompt_embeds", "AA"),
    ("store", True),
    ("web_search_options", {}),
    ("service_tier", "flex"),
    ("spaces_between_special_tokens", 1),
    ("return_token_ids", "yes"),
    ("echo", 1),
]


@in_loop
async def test_fields_that_are_not_heard_are_refused_by_name(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        for name, value in REFUSED:
            error = await refusal(made, prompt="a", **{name: value})
            assert error["param"] == name, name
            assert error["message"].startswith(name)
        assert made.scheduler.requests == []


@in_loop
async def test_unknown_fields_are_named(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("ok")
        neutral = {"use_beam_search": False, "length_penalty": 1.0, "bad_words": [], "service_tier": "auto"}
        body = {"prompt": "a", "user": "me", "metadata": {}, "from_the_future": 1, "evil\r\nname: x": 2, **neutral}
        for more in ({}, {"stream": True}):
            answer = await made.http.post("/v1/completions", json={**body, **more})
            assert answer.status_code == 200
            assert answer.headers["x-octavo-ignored-fields"] == "from_the_future"
        answer = await made.http.post("/v1/completions", json={"prompt": "a"})
        assert "x-octavo-ignored-fields" not in answer.headers


@in_loop
async def test_a_request_id_goes_in_out_and_below(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("ok")
        answer = await made.http.post("/v1/completions", json={"prompt": "a", "request_id": "mine/1"})
        assert answer.headers["x-request-id"] == "mine1"
        assert made.scheduler.requests[-1].request_id == "mine1"
        answer = await made.http.post("/v1/completions", json={"prompt": "a"})
        assert answer.headers["x-request-id"] == made.scheduler.requests[-1].request_id


@in_loop
async def test_tokenize_and_detokenize(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        found = await post(made, "/tokenize", model=MODEL, prompt="aé", return_token_strs=True)
        assert (found["tokens"], found["count"], found["max_model_len"]) == (made.ids("aé"), 3, CONTEXT)
        assert found["token_strs"] == ["a", "\ufffd", "\ufffd"]
        assert (await post(made, "/tokenize", prompt=""))["tokens"] == []
        assert (await post(made, "/detokenize", tokens=made.ids("aé")))["prompt"] == "aé"
        assert (await post(made, "/detokenize", tokens=[]))["prompt"] == ""
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        ids = (await post(made, "/tokenize", **chat))["tokens"]
        made.say("ok")
        await post(made, "/v1/chat/completions", **chat)
        assert ids == list(made.scheduler.requests[0].prompt_token_ids)
        closed = await post(made, "/tokenize", **chat, add_generation_prompt=False)
        assert closed["count"] < len(ids)
        both = await made.http.post("/tokenize", json={**chat, "prompt": "a"})
        assert (both.status_code, both.json()["error"]["param"]) == (400, "prompt")
        vocab = made.tokenizer.vocab_size
        for path, body, param in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": ["a"]}, "prompt"),
            ("/detokenize", {}, "tokens"),
            ("/detokenize", {"tokens": "a"}, "tokens"),
            ("/detokenize", {"tokens": [1, vocab]}, "tokens[1]"),
        ):
            assert (await refusal(made, path, **body))["param"] == param
        assert (await refusal(made, "/tokenize", 404, model="other", prompt="a"))["param"] == "model"


@in_loop
async def test_models_are_found_by_name(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        found = (await made.http.get(f"/v1/models/{MODEL}")).json()
        assert found in (await made.http.get("/v1/models")).json()["data"]
        missing = await made.http.get("/v1/models/some/other")
        assert missing.status_code == 404
        assert MODEL in missing.json()["error"]["message"]


@in_loop
async def test_what_no_served_model_can_do_is_said(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        for path, body in (
            ("/v1/embeddings", {"input": ["a", "b"]}),
            ("/v1/rerank", {"query": "q", "documents": ["a"]}),
            ("/rerank", {"query": "q", "documents": ["a"]}),
            ("/score", {"text_1": "a", "text_2": "b"}),
        ):
            error = await refusal(made, path, model=MODEL, **body)
            assert error["param"] == "model"
            assert MODEL in error["message"]
            assert (await refusal(made, path, 404, model="other", **body))["param"] == "model"
            assert (await refusal(made, path))["param"] in body
