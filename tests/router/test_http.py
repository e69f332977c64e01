"""The HTTP surface beside its text: refusals by field, bodies by bytes, ids, status pages."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from octavo.client import AsyncClient, InvalidArgument
from octavo.internal.v1 import scheduler_pb2, types_pb2
from octavo.internal.v1 import types_pb2 as types
from router.metrics_catalogue import REFUSALS
from tests.fakes.router_stack import CONTEXT, MODEL, Stack, in_loop, stack, write_text_model

CANARY = "canary-c0ffee"


async def refused(made: Stack, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error of a request that never reaches the scheduler."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await made.http.post(path, content=raw)
    assert answer.status_code == status, (body, answer.text)
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert made.scheduler.requests == []
    return error


@in_loop
async def test_f28_bad_prompts_are_refused_with_their_index(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        vocab = made.tokenizer.vocab_size
        cases: list[tuple[Any, str]] = [
            ([], "prompt"),
            ("", "prompt"),
            ([""], "prompt[0]"),
            ([[]], "prompt[0]"),
            ([-1], "prompt[0]"),
            ([1, vocab], "prompt[1]"),
            ([2**31], "prompt[0]"),
            ([1.5], "prompt[0]"),
            ([True], "prompt[0]"),
            (["a", [1]], "prompt[1]"),
            ([[1], [1, -1]], "prompt[1][1]"),
            (None, "prompt"),
            (7, "prompt"),
        ]
        for prompt, param in cases:
            assert (await refused(made, "/v1/completions", {"prompt": prompt}))["param"] == param, prompt


@in_loop
async def test_f12_out_of_vocabulary_ids_are_refused(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        vocab = made.tokenizer.vocab_size
        for bias in ({str(vocab): 5}, {"-1": 5}, {"abc": 1}, {"5": 101}, {"5": None}, [1]):
            error = await refused(made, "/v1/completions", {"prompt": "a", "logit_bias": bias})
            assert error["param"].startswith("logit_bias")
        body = {"prompt": "a", "stop_token_ids": [vocab, -1], "min_tokens": 1, "max_tokens": 4}
        assert (await refused(made, "/v1/completions", body))["param"] == "stop_token_ids[0]"


BAD_FIELDS: list[tuple[str, Any]] = [
    ("temperature", 2.1),
    ("temperature", "1"),
    ("top_p", 0),
    ("top_k", -1),
    ("n", 0),
    ("n", 129),
    ("max_tokens", 0),
    ("max_tokens", CONTEXT),
    ("seed", 2**63),
    ("logprobs", 21),
    ("logprobs", True),
    ("best_of", 129),
    ("suffix", "end"),
    ("priority", 2**31),
    ("priority", "high"),
    ("adapter", "lora"),
    ("cache_salt", "s" * 300),
    ("stream", "yes"),
    ("model", 3),
    ("structured_outputs", "no object"),
]


@in_loop
async def test_a_bad_field_is_named(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        for field, value in BAD_FIELDS:
            error = await refused(made, "/v1/completions", {"prompt": "a", field: value})
            assert error["param"] == field
            assert error["message"].startswith(field)


@in_loop
async def test_what_a_chat_cannot_do_is_refused_by_its_path(model_dir: Path) -> None:
    user = {"role": "user", "content": "hi"}
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"messages": [user, image]}, "messages[1].content[0]"),
        ({"messages": []}, "messages"),
        ({}, "messages"),
        ({"messages": [user], "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": [user], "response_format": {"type": "xml"}}, "response_format.type"),
        ({"messages": [user], "echo": True}, "echo"),
        ({"messages": [user], "modalities": ["audio"]}, "modalities"),
    ]
    async with stack(model_dir) as made:
        for body, param in cases:
            error = await refused(made, "/v1/chat/completions", body)
            assert (error["param"] or "").startswith(param), (body, error)


@in_loop
async def test_f20_a_model_without_a_template_still_completes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with stack(write_text_model(tmp_path, template="")) as made:
        assert "has no chat template" in caplog.text
        async with AsyncClient(made.grpc_address) as client:
            with pytest.raises(InvalidArgument, match="chat_template"):
                await client.chat([{"role": "user", "content": "hi"}])
        error = await refused(made, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
        assert "chat_template" in error["message"]
        made.say("ok")
        assert (await made.http.post("/v1/completions", json={"prompt": "a"})).status_code == 200


BAD_BODIES = [
    b"",
    b"{",
    b"[]",
    b'"text"',
    b'{"prompt": "\xff"}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": Infinity}',
    b"[" * 100_000,
    b'{"prompt": "a\\ud83d b"}',
    b'{"prompt": "a", "stop": "\\ud83d"}',
    b'{"prompt": "a", "model": "\\ud83d"}',
    b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
]


@in_loop
async def test_f32_bodies_that_are_no_text_or_no_json(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        for raw in BAD_BODIES:
            answer = await made.http.post("/v1/completions", content=raw)
            assert answer.status_code == 400, raw[:80]
        assert made.scheduler.requests == []


@in_loop
async def test_f32_nul_and_a_byte_order_mark_are_legal(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("ok")
        assert (await made.http.post("/v1/completions", json={"prompt": "a\0b"})).status_code == 200
        assert list(made.scheduler.requests[0].prompt_token_ids) == made.ids("a\0b")
        answer = await made.http.post("/v1/completions", content=b'\xef\xbb\xbf{"prompt": "a"}')
        assert answer.status_code == 200


@in_loop
async def test_f30_oversize_bodies_are_refused_by_their_bytes(model_dir: Path) -> None:
    async with stack(model_dir, max_message_bytes=2**16) as made:
        error = await refused(made, "/v1/completions", {"prompt": "a" * 2**16}, 413)
        assert "--max-message-bytes" in error["message"]

        async def pieces() -> Any:
            for _ in range(5):
                yield b"a" * 2**14

        answer = await made.http.post("/v1/completions", content=pieces())
        assert answer.status_code == 413
        # Within the limit of bytes, but no tokenizer makes it fit: refused without encoding it.
        error = await refused(made, "/v1/completions", {"prompt": "a" * 60_000}, 413)
        assert str(CONTEXT) in error["message"]
        made.say("ok")
        assert (await made.http.post("/v1/completions", json={"prompt": "a"})).status_code == 200


@in_loop
async def test_f30_health_answers_while_a_long_prompt_is_encoded(tmp_path: Path) -> None:
    async with stack(write_text_model(tmp_path, ["x" * 40_000])) as made:
        made.say("ok")
        text = "ab" * 250_000  # within what the longest token would allow, far over what fits
        long = asyncio.create_task(made.http.post("/v1/completions", json={"prompt": text}))
        slowest, loop, count = 0.0, asyncio.get_running_loop(), 0
        while not long.done():
            begun = loop.time()
            assert (await made.http.get("/health")).status_code == 200
            slowest, count = max(slowest, loop.time() - begun), count + 1
        assert (await long).status_code == 400
        assert count > 1
        assert slowest < 1.0


@in_loop
async def test_f42_request_ids_are_echoed_and_never_keys(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("ok")
        body = {"prompt": "a"}
        same = [made.http.post("/v1/completions", json=body, headers={"X-Request-Id": "dup"}) for _ in range(2)]
        answers = await asyncio.gather(*same)
        assert [answer.headers["x-request-id"] for answer in answers] == ["dup", "dup"]
        assert [answer.json()["choices"][0]["text"] for answer in answers] == ["ok", "ok"]
        assert len({answer.json()["id"] for answer in answers}) == 2
        assert len({request.stream_key for request in made.scheduler.requests}) == 2
        for given, shown in (("a/b c\tü", "abc"), ("z" * 1000, "z" * 128)):
            answer = await made.http.post("/v1/completions", json=body, headers={b"X-Request-Id": given.encode()})
            assert answer.headers["x-request-id"] == shown
        assert (await made.http.get("/health")).headers["x-request-id"]


@in_loop
async def test_unknown_fields_have_no_effect(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("ok")
        body = {"prompt": "a", "user": "me", "from_the_future": 1, "suffix": None, "best_of": 1}
        assert (await made.http.post("/v1/completions", json=body)).status_code == 200


@in_loop
async def test_every_sampling_field_reaches_the_scheduler(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("ok")
        body = {
            "prompt": "a",
            "temperature": 0.5,
            "top_p": 0.25,
            "top_k": 7,
            "min_p": 0.125,
            "presence_penalty": 1,
            "frequency_penalty": -1,
            "repetition_penalty": 1.5,
            "logit_bias": {"5": 2},
            "max_tokens": 9,
            "min_tokens": 3,
            "stop_token_ids": [9],
            "priority": -2,
            "cache_salt": "salt",
        }
        await made.http.post("/v1/completions", json=body)
        await made.http.post("/v1/completions", json={"prompt": "a", "ignore_eos": True})
        first, second = made.scheduler.requests
        sampling = first.sampling
        numbers = [sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p]
        assert numbers == [0.5, 0.25, 7, 0.125]
        assert [sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty] == [1, -1, 1.5]
        assert (list(sampling.bias_token_ids), list(sampling.bias_values)) == ([5], [2])
        assert (sampling.max_tokens, sampling.min_tokens) == (9, 3)
        assert (list(sampling.end_token_ids), list(sampling.stop_token_ids)) == ([0], [9])
        assert (first.priority, first.cache_salt, first.task) == (-2, "salt", types.TASK_GENERATE)
        assert list(second.sampling.end_token_ids) == []
        assert second.sampling.max_tokens == 16


@in_loop
async def test_status_pages(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        assert (await made.http.get("/health")).json() == {"status": "ok"}
        assert "version" in (await made.http.get("/version")).json()
        ready = await made.http.get("/ready")
        assert ready.status_code == 200
        assert ready.json()["ready"] is True
        assert ready.json()["models"] == [MODEL]
        assert [phase["name"] for phase in ready.json()["phases"]] == ["model", "tokenizer"]
        (model,) = (await made.http.get("/v1/models")).json()["data"]
        assert (model["id"], model["max_model_len"]) == (MODEL, CONTEXT)
        missing = await made.http.get("/v1/nothing")
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
        assert (await made.http.get("/v1/completions")).status_code == 405


@in_loop
async def test_head_has_the_headers_of_get(model_dir: Path) -> None:
    async with stack(model_dir, health_port=0) as made:
        paths = ("/health", "/ready", "/version", "/metrics", "/v1/models", f"/v1/models/{MODEL}", "/", "/openapi.json")
        apart = f"http://127.0.0.1:{made.router.health_port}/health"
        for path in (*paths, apart):
            head, whole = await made.http.head(path), await made.http.get(path)
            assert (head.status_code, head.content) == (200, b""), path
            assert head.headers["content-type"] == whole.headers["content-type"]
            assert path == "/metrics" or head.headers["content-length"] == str(len(whole.content))
        assert (await made.http.head("/v1/completions")).status_code == 405


@in_loop
async def test_f44_readiness_follows_the_workers(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.scheduler.num_ready_replicas = 0
        phase = types_pb2.StartPhase(name="weights", detail="12/30 tensors", seconds=1.5)
        made.scheduler.starting = [scheduler_pb2.StartingWorker(name="host:1", phase=phase)]
        made.scheduler.announce()
        await made.until_ready(False)
        ready = await made.http.get("/ready")
        assert ready.status_code == 503
        assert ready.json()["reason"] == f"no replica of {MODEL} is ready"
        last = ready.json()["phases"][-1]
        assert (last["process"], last["name"], last["done"], last["total"]) == ("host:1", "weights", 12, 30)
        answer = await made.http.post("/v1/completions", json={"prompt": "a"})
        assert (answer.status_code, made.scheduler.requests) == (503, [])


@in_loop
async def test_another_tokenizer_is_not_served(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.scheduler.info.tokenizer_hash = "0" * 64
        made.scheduler.announce()
        await made.until_ready(False)
        reason = (await made.http.get("/ready")).json()["reason"]
        assert "000000000000" in reason
        assert "same model files" in reason


@in_loop
async def test_f72_prompts_are_not_logged(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with stack(model_dir) as made:
        made.say("ok")
        for body in (
            {"prompt": CANARY},
            {"prompt": CANARY, "temperature": 9},
            {"prompt": CANARY * 100},
            {"prompt": CANARY, "stop": CANARY, "user": CANARY, CANARY: 1},
        ):
            await made.http.post("/v1/completions", json=body)
    assert CANARY not in caplog.text


@in_loop
async def test_equal_prompts_of_a_request_without_a_seed_are_answered_differently(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("ok")
        await made.http.post("/v1/completions", json={"prompt": ["a", "a"]})
        assert len({request.sampling.seed for request in made.scheduler.requests}) == 2
        await made.http.post("/v1/completions", json={"prompt": ["a", "a"], "seed": 7})
        assert [request.sampling.seed for request in made.scheduler.requests[2:]] == [7, 7]


@in_loop
async def test_a_defect_is_found_in_log_and_metrics_by_what_the_client_was_told(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def crash() -> None:
        raise RuntimeError(CANARY)

    async with stack(model_dir) as made:
        made.router.app.add_api_route("/crash", crash)
        answer = await made.http.get("/crash", headers={"x-request-id": "mine"})
        assert (answer.status_code, CANARY in answer.text) == (500, False)
        assert "request id mine" in answer.json()["error"]["message"]
        assert "request id mine" in caplog.text
        assert made.router.metrics.set.number(REFUSALS, "internal", "500").value == 1


@in_loop
async def test_the_routers_seed_repeats_the_seeds_of_requests_that_bring_none(model_dir: Path) -> None:
    async def seeds(**config: Any) -> list[int]:
        async with stack(model_dir, **config) as made:
            made.say("ok")
            for _ in range(2):
                await made.http.post("/v1/completions", json={"prompt": "a"})
            await made.http.post("/v1/completions", json={"prompt": "a", "seed": 11})
            return [request.sampling.seed for request in made.scheduler.requests]

    first = await seeds(seed=5)
    assert first == await seeds(seed=5)
    assert first[-1] == 11
    assert len({*first, *await seeds(seed=6), *await seeds()}) == 7
