"""A page of one origin calls a router of another, in a browser that holds it to the rules."""

from __future__ import annotations

from asyncio import to_thread as seen
from pathlib import Path
from typing import Any

from tests.browser.person import Page
from tests.fakes.router_stack import in_loop_within, stack

TEST_LIMIT_S = 120.0

ASK = """
const [base, key, done] = arguments;
const headers = {authorization: `Bearer ${key}`};
const json = {...headers, "content-type": "application/json"};
const web = {...headers, "content-type": "application/grpc-web+proto", "x-grpc-web": "1", "grpc-timeout": "9S"};
const chat = JSON.stringify({messages: [{role: "user", content: "hi"}]});
const service = `${base}/octavo.v1.InferenceService/`;
Promise.all([
  fetch(`${base}/v1/chat/completions`, {method: "POST", headers: json, body: chat}).then((r) => r.json()),
  fetch(service + "ChatUnary", {method: "POST", headers: json, body: `{"request": ${chat}}`}).then((r) => r.json()),
  fetch(service + "Generate", {method: "POST", headers: web, body: new Uint8Array(5)}).then(async (r) => [
    (await r.text()).match(/grpc-status: (\\d+)/)?.[1], r.headers.get("x-request-id")]),
]).then(done, (error) => done(String(error)));
"""


@in_loop_within(TEST_LIMIT_S)
async def test_only_pages_that_are_named_may_ask(model_dir: Path, page: Page) -> None:
    async with (
        stack(model_dir) as home,
        stack(model_dir) as stranger,
        stack(model_dir, cors_origins=home.base_url, api_key="k") as made,
    ):
        made.say("ok")

        def ask_from(origin: str, key: str) -> Any:
            page.browser.get(f"{origin}/version")
            return page.browser.execute_async_script(ASK, made.base_url, key)

        openai, connect, web = await seen(ask_from, home.base_url, "k")
        assert openai["choices"][0]["message"]["content"] == "ok"
        assert connect["choices"][0]["content"]["text"] == "ok"
        assert web[0] == "3"  # a request without a prompt
        assert web[1]
        openai, connect, web = await seen(ask_from, home.base_url, "wrong")
        assert openai["error"]["type"] == "authentication_error"
        assert (connect["code"], web[0]) == ("unauthenticated", "16")
        num_asked = len(made.scheduler.requests)
        assert "Failed to fetch" in await seen(ask_from, stranger.base_url, "k")
        assert len(made.scheduler.requests) == num_asked
