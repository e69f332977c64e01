"""Which web pages may call: preflights and answers of every surface on the HTTP port."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.options import OptionError
from octavo.v1 import inference_pb2 as pb
from router.browser.options import open_to_pages
from router.config import RouterConfig
from tests.fakes.router_stack import in_loop, stack
from tests.fakes.web_rpc import Form, call, path_of

OURS, OTHERS = "https://chat.example.com", "https://evil.example.com"
PATHS = ["/v1/chat/completions", "/v1/models", path_of("Chat"), path_of("ListModels")]
REQUESTED = "authorization,connect-protocol-version,content-type,grpc-timeout,x-grpc-web,x-stainless-os,x-user-agent"


def preflight(origin: str, method: str = "POST") -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": REQUESTED,
    }


@pytest.mark.parametrize("path", PATHS)
@in_loop
async def test_a_preflight_needs_no_key(model_dir: Path, path: str) -> None:
    async with stack(model_dir, cors_origins=f"{OURS}, http://localhost:5173", api_key="k") as made:
        answer = await made.http.options(path, headers=preflight(OURS))
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == OURS
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert set(REQUESTED.split(",")) <= set(answer.headers["access-control-allow-headers"].split(","))
        assert int(answer.headers["access-control-max-age"]) > 0
        assert "access-control-allow-credentials" not in answer.headers
        refused = await made.http.options(path, headers=preflight(OTHERS))
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in refused.headers
        assert (await made.http.options(path, headers=preflight(OURS, "DELETE"))).status_code == 400


@pytest.mark.parametrize("form", Form)
@in_loop
async def test_answers_and_refusals_may_be_read_by_those_pages_alone(model_dir: Path, form: Form) -> None:
    async with stack(model_dir, cors_origins=OURS, api_key="k") as made:
        made.say("ok")
        chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hi")])
        for key, code in (("k", 0), ("wrong", 16)):
            headers = {"authorization": f"Bearer {key}", "origin": OURS}
            ended = await call(made.http, form, "Chat", chat, headers)
            assert ended.code == code
            assert ended.headers["access-control-allow-origin"] == OURS
            assert "Origin" in ended.headers["vary"]
            exposed = {name.strip().lower() for name in ended.headers["access-control-expose-headers"].split(",")}
            assert {"grpc-status", "grpc-message", "grpc-status-details-bin", "x-request-id", "retry-after"} <= exposed
        stranger = await call(made.http, form, "Chat", chat, {"authorization": "Bearer k", "origin": OTHERS})
        assert "access-control-allow-origin" not in stranger.headers


@in_loop
async def test_every_page_and_no_page(model_dir: Path) -> None:
    async with stack(model_dir, cors_origins="*") as made:
        answer = await made.http.options("/v1/models", headers=preflight(OTHERS, "GET"))
        assert answer.headers["access-control-allow-origin"] == "*"
        answer = await made.http.get("/v1/models", headers={"origin": OTHERS})
        assert answer.headers["access-control-allow-origin"] == "*"
    async with stack(model_dir) as made:
        for path in PATHS:
            answer = await made.http.options(path, headers=preflight(OURS))
            assert answer.status_code == 405
            assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "origins",
    ["chat.example.com", "https://chat.example.com/", "HTTPS://CHAT.EXAMPLE.COM", "https://a b", "*,https://a", "null"],
)
def test_what_no_browser_calls_an_origin_is_refused(origins: str) -> None:
    with pytest.raises(OptionError, match="--cors-origins"):
        RouterConfig(cors_origins=origins)


def test_what_browsers_call_an_origin_is_taken() -> None:
    origins = ("https://a.example.com", "http://localhost:8080", "http://[::1]:3000", "chrome-extension://abcdef")
    assert RouterConfig(cors_origins=",".join(origins)).origins == origins


def test_a_router_that_every_page_may_use_says_so() -> None:
    def said(**options: Any) -> list[str]:
        config = RouterConfig(**options)
        return open_to_pages(config, asks_for_keys=config.asks_for_keys)

    assert "--cors-origins" in said(cors_origins="*")[0]
    assert not said(cors_origins="*", api_key="k")
    assert not said(cors_origins=OURS)
    assert not said()
