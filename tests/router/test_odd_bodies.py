"""Any JSON in any field: an answer or a refusal that names something, never a defect, and the router lives on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from router.openai.fields import CHAT_FIELDS, COMPLETION_FIELDS
from tests.fakes.router_stack import in_loop, stack
from tests.router.chat_models import write_thinking_model

ODD: list[Any] = [
    True,
    -1,
    2**70,
    1.5,
    "",
    "\ud800",
    ["x"],
    [[]],
    [None],
    {"x": 1},
    {"type": "function", "function": {"name": "add"}},
    [{"type": "function", "function": {"name": "add"}}],
    [{"role": "assistant", "content": None, "tool_calls": [{}]}],
]
BASES: dict[str, tuple[dict[str, Any], frozenset[str]]] = {
    "/v1/completions": (
        {"prompt": "a", "max_tokens": 2},
        COMPLETION_FIELDS - CHAT_FIELDS | {"logprobs", "echo", "best_of", "stream"},
    ),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}, CHAT_FIELDS),
    "/tokenize": ({"prompt": "a"}, frozenset({"model", "prompt", "messages", "tools", "return_token_strs"})),
    "/detokenize": ({"tokens": [1]}, frozenset({"model", "tokens", "skip_special_tokens"})),
    "/v1/embeddings": ({"input": "a"}, frozenset({"model", "input"})),
}


@in_loop
async def test_each_field_with_each_odd_value(tmp_path: Path) -> None:
    async with stack(write_thinking_model(tmp_path)) as made:
        made.say("ok</think>ok")
        for path, (base, fields) in BASES.items():
            for field in sorted(fields):
                for value in ODD:
                    answer = await made.http.post(path, content=json.dumps({**base, field: value}))
                    assert answer.status_code in (200, 400, 404, 413), (path, field, value, answer.text)
                    if answer.status_code != 200:
                        error = answer.json()["error"]
                        assert error["message"], (path, field, value)
        assert (await made.http.get("/health")).status_code == 200
        assert (await made.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 4})).status_code == 200


SURROGATE = "\ud800"
SCHEMAS: list[Any] = [{"const": SURROGATE}, {"properties": {SURROGATE: {}}}, json.dumps({"const": SURROGATE})]


@in_loop
async def test_what_unicode_cannot_say_is_refused_wherever_json_can_say_it(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        for more in (
            *({"guided_json": schema} for schema in SCHEMAS),
            *({"structured_outputs": {"json": schema}} for schema in SCHEMAS),
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMAS[0]}}},
            {"structured_outputs": {SURROGATE: 1}},
            {"structured_outputs": {"choice": [SURROGATE]}},
            {"logit_bias": {SURROGATE: 1}},
        ):
            answer = await made.http.post("/v1/completions", content=json.dumps({"prompt": "a", **more}))
            assert answer.status_code == 400, (more, answer.text)
            assert answer.json()["error"]["param"].startswith(next(iter(more)))


@in_loop
async def test_a_path_with_a_slash_too_many_is_not_found(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        answer = await made.http.post("/v1/completions/", json={"prompt": "a"}, headers={"host": "elsewhere.example"})
        assert (answer.status_code, "location" in answer.headers) == (404, False)
