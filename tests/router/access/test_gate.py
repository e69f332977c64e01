"""The gate on both surfaces: every route and method behind it but health, and what the caller is then taken for."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from starlette.routing import BaseRoute, Mount, Route

from octavo.client import AsyncClient, PermissionDenied, Unauthenticated
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc as pb_grpc
from router.access.http_gate import OPEN_PATHS
from router.access.key_file import KeyFile, PriorityRange, TenantLimits, change_key_file, new_key, record_of
from tests.fakes.router_stack import Stack, in_loop, stack

KEY = "a-single-key"
BODY = {"prompt": "abc", "max_tokens": 4}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def add_key(path: Path, tenant: str, priorities: str = "0..", limits: TenantLimits | None = None) -> str:
    key = new_key()
    record = record_of(key, tenant, PriorityRange.parse(priorities))

    def change(file: KeyFile) -> KeyFile:
        tenants = {**file.tenants, tenant: limits} if limits else file.tenants
        return replace(file, keys=(*file.keys, record), tenants=tenants)

    change_key_file(path, change)
    return key


@contextlib.asynccontextmanager
async def keyed(model_dir: Path, tmp_path: Path, **config: Any) -> AsyncIterator[tuple[Stack, Path]]:
    """A stack behind a key file that is empty but for what the test adds before."""
    path = tmp_path / "keys.json"
    if not path.exists():
        change_key_file(path, lambda file: file)
    async with stack(model_dir, key_file=str(path), **config) as made:
        made.say("ok")
        yield made, path


def paths_of(routes: list[BaseRoute], prefix: str = "") -> set[tuple[str, str]]:
    """(method, path) of every route, those that are mounted included."""
    found: set[tuple[str, str]] = set()
    for route in routes:
        if isinstance(route, Mount):
            found |= paths_of(list(route.routes or []), prefix + route.path) or {("GET", prefix + route.path + "/")}
        elif isinstance(route, Route):
            path = prefix + route.path.replace("{", "").replace("}", "")
            found |= {(method, path) for method in route.methods or {"GET"}}
    return found


@in_loop
async def test_every_route_but_health_needs_the_key(model_dir: Path) -> None:
    async with stack(model_dir, api_key=KEY) as made:
        routes = paths_of(made.router.app.routes)
        assert {("POST", "/v1/chat/completions"), ("GET", "/metrics"), ("GET", "/openapi.json")} <= routes
        strangers = {("GET", "/nothing"), ("POST", "/v1/nothing"), ("OPTIONS", "/v1/models"), ("GET", "/health/")}
        strangers |= {("GET", "//health"), ("GET", "/ready/../metrics"), ("PATCH", "/metrics"), ("GET", "/%2e/health")}
        num_refused = 0
        for method, path in sorted(routes | strangers):
            for headers in ({}, bearer("wrong"), {"authorization": KEY}, {"authorization": "Bearer"}):
                answer = await made.http.request(method, path, headers=headers)
                if path in OPEN_PATHS:
                    assert answer.status_code != 401, (method, path)
                    continue
                assert answer.status_code == 401, (method, path, headers)
                num_refused += 1
                assert answer.headers["www-authenticate"] == 'Bearer realm="octavo"'
                assert answer.headers["x-request-id"]
                if method != "HEAD":
                    error = answer.json()["error"]
                    assert error["type"] == "authentication_error"
                    assert "key" in error["message"].lower()
        assert {path for path in OPEN_PATHS if ("GET", path) in routes} == OPEN_PATHS
        counted = (await made.http.get("/metrics", headers=bearer(KEY))).text
        refusals = [line for line in counted.splitlines() if line.startswith("octavo_request_refusals_total{")]
        (unauthenticated,) = [line for line in refusals if 'reason="unauthenticated"' in line]
        assert float(unauthenticated.rpartition(" ")[2]) == num_refused


@in_loop
async def test_the_key_opens_every_surface(model_dir: Path) -> None:
    async with stack(model_dir, api_key=KEY) as made:
        made.say("ok")
        for word in ("Bearer", "bearer", "BEARER "):
            answer = await made.http.post("/v1/completions", json=BODY, headers={"authorization": f"{word} {KEY}"})
            assert answer.status_code == 200, answer.text
        assert (await made.http.get("/metrics", headers=bearer(KEY))).status_code == 200
        async with AsyncClient(made.grpc_address, api_key=KEY) as client:
            assert (await client.generate("abc")).text == "ok"
            assert [model.name for model in await client.models()] == ["tiny"]
        assert made.scheduler.requests[-1].tenant == ""


@in_loop
async def test_a_browser_may_look_with_the_key_as_a_password_and_ask_nothing(model_dir: Path) -> None:
    async with stack(model_dir, api_key=KEY) as made:
        made.say("ok")
        basic = {"authorization": "Basic " + base64.b64encode(f"me:{KEY}".encode()).decode()}
        assert (await made.http.get("/v1/models", headers=basic)).status_code == 200
        assert (await made.http.post("/v1/completions", json=BODY, headers=basic)).status_code == 401
        for bad in ("Basic !!!", "Basic " + base64.b64encode(b"no colon").decode(), "Basic /w==", "Digest x"):
            assert (await made.http.get("/v1/models", headers={"authorization": bad})).status_code == 401
        person = await made.http.get("/docs", headers={"accept": "text/html,*/*"})
        assert person.headers["www-authenticate"].startswith("Basic")


@in_loop
async def test_two_authorizations_are_refused(model_dir: Path) -> None:
    async with stack(model_dir, api_key=KEY) as made:
        twice = [("authorization", "Bearer wrong"), ("authorization", f"Bearer {KEY}")]
        answer = await made.http.get("/v1/models", headers=twice)
        assert answer.status_code == 401
        assert "2 times" in answer.json()["error"]["message"]


@in_loop
async def test_every_grpc_method_but_health_needs_the_key(model_dir: Path) -> None:
    async with stack(model_dir, api_key=KEY) as made:
        made.say("ok")
        channel: Any = made.channel
        methods = [
            f"/{service.full_name}/{method.name}"
            for service in pb.DESCRIPTOR.services_by_name.values()
            for method in service.methods
        ]
        methods += ["/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/no.such.Service/Method"]
        for method in methods:
            for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", KEY),)):
                call = channel.stream_stream(method)(metadata=metadata)
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED, method
        health = health_pb2_grpc.HealthStub(made.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        metadata = (("authorization", f"Bearer {KEY}"),)
        reflect = reflection_pb2_grpc.ServerReflectionStub(made.channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = [answer async for answer in reflect.ServerReflectionInfo(iter([asked]), metadata=metadata)]
        assert len(answers[0].list_services_response.service) == 3
        unknown = channel.stream_stream("/no.such.Service/Method")(metadata=metadata)
        assert await unknown.code() is grpc.StatusCode.UNIMPLEMENTED
        async with AsyncClient(made.grpc_address, api_key="wrong") as client:
            with pytest.raises(Unauthenticated, match="not known"):
                await client.generate("abc")


@in_loop
async def test_f70_a_key_decides_the_tenant_and_clients_do_not(model_dir: Path, tmp_path: Path) -> None:
    acme = add_key(tmp_path / "keys.json", "acme")
    async with keyed(model_dir, tmp_path) as (made, _):
        claims = {**BODY, "tenant": "other", "cache_salt": "s", "user": "other"}
        answer = await made.http.post("/v1/completions", json=claims, headers={**bearer(acme), "x-tenant": "other"})
        assert answer.status_code == 200, answer.text
        stub = pb_grpc.InferenceServiceStub(made.channel)
        metadata = (("authorization", f"Bearer {acme}"), ("tenant", "other"))
        async for _ in stub.Generate(pb.GenerateRequest(text="abc"), metadata=metadata):
            pass
        assert [request.tenant for request in made.scheduler.requests] == ["acme", "acme"]
        assert made.scheduler.requests[0].cache_salt == "s"


@in_loop
async def test_a_key_has_its_range_of_priorities(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    plain, better, worse = add_key(path, "t"), add_key(path, "t", "-5..5"), add_key(path, "t", "3..")
    async with keyed(model_dir, tmp_path) as (made, _):
        for key, priority, sent in ((plain, 7, 7), (better, -5, -5), (better, 0, 0), (worse, 0, 3), (worse, 4, 4)):
            answer = await made.http.post("/v1/completions", json={**BODY, "priority": priority}, headers=bearer(key))
            assert answer.status_code == 200, answer.text
            assert made.scheduler.requests[-1].priority == sent
        for key, priority, limit in ((plain, -1, "[0, "), (better, 6, "[-5, 5]"), (worse, 1, "[3, ")):
            answer = await made.http.post("/v1/completions", json={**BODY, "priority": priority}, headers=bearer(key))
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["param"] == "priority"
            assert limit in error["message"]
            assert f"got {priority}" in error["message"]


@in_loop
async def test_a_revoked_key_is_refused_on_both_surfaces_without_a_restart(model_dir: Path, tmp_path: Path) -> None:
    key = add_key(tmp_path / "keys.json", "acme")
    async with keyed(model_dir, tmp_path) as (made, path), AsyncClient(made.grpc_address, api_key=key) as client:
        assert (await made.http.get("/v1/models", headers=bearer(key))).status_code == 200
        await client.models()
        change_key_file(path, lambda file: replace(file, keys=()))
        made.router.access.refresh()
        assert (await made.http.get("/v1/models", headers=bearer(key))).status_code == 401
        with pytest.raises(Unauthenticated):
            await client.models()
        new = add_key(path, "acme")
        made.router.access.refresh()
        assert (await made.http.get("/v1/models", headers=bearer(new))).status_code == 200


@in_loop
async def test_a_tenant_over_its_rate_is_told_when_to_come_back(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    slow, fast = add_key(path, "slow", limits=TenantLimits(requests_per_minute=1)), add_key(path, "fast")
    async with keyed(model_dir, tmp_path) as (made, _):
        assert (await made.http.post("/v1/completions", json=BODY, headers=bearer(slow))).status_code == 200
        for stream in (False, True):
            answer = await made.http.post("/v1/completions", json={**BODY, "stream": stream}, headers=bearer(slow))
            assert answer.status_code == 429
            assert 50 <= int(answer.headers["retry-after"]) <= 60
            assert answer.json()["error"]["type"] == "rate_limit_error"
        stub = pb_grpc.InferenceServiceStub(made.channel)
        call = stub.GenerateUnary(
            pb.GenerateUnaryRequest(request=pb.GenerateRequest(text="a")),
            metadata=(("authorization", f"Bearer {slow}"),),
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        metadata: Any = refused.value.trailing_metadata() or ()
        details = dict(metadata)["grpc-status-details-bin"]
        retry = error_details_pb2.RetryInfo()
        assert status_pb2.Status.FromString(details).details[0].Unpack(retry)
        assert 50 <= retry.retry_delay.seconds <= 60
        assert (await made.http.get("/v1/models", headers=bearer(slow))).status_code == 200
        assert (await made.http.post("/v1/completions", json=BODY, headers=bearer(fast))).status_code == 200


@in_loop
async def test_tokens_are_counted_as_they_come(model_dir: Path) -> None:
    async with stack(model_dir, tenant_tokens_per_minute=10) as made:
        made.say("twelve bytes")
        body = {"prompt": [5, 6, 7], "max_tokens": 32}
        assert (await made.http.post("/v1/completions", json=body)).status_code == 200
        answer = await made.http.post("/v1/completions", json=body)
        assert answer.status_code == 429
        assert "10 tokens a minute" in answer.json()["error"]["message"]
        assert 5 < int(answer.headers["retry-after"]) <= 36


@in_loop
async def test_only_listed_addresses_come_in_and_only_a_trusted_proxy_speaks_for_others(model_dir: Path) -> None:
    async with stack(model_dir, allow_networks="10.0.0.0/8") as made:
        for path in ("/health", "/v1/models", "/nothing"):
            answer = await made.http.get(path, headers={"x-forwarded-for": "10.1.1.1"})
            assert answer.status_code == 403
            assert answer.json()["error"]["type"] == "permission_error"
        async with AsyncClient(made.grpc_address) as client:
            with pytest.raises(PermissionDenied, match="--allow-networks"):
                await client.models()
            with pytest.raises(PermissionDenied):
                await client.generate("abc")
        health = health_pb2_grpc.HealthStub(made.channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await health.Check(health_pb2.HealthCheckRequest())
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    proxied: dict[str, Any] = {"allow_networks": "10.0.0.0/8", "trusted_proxies": "127.0.0.0/8"}
    async with stack(model_dir, **proxied) as made:
        assert (await made.http.get("/v1/models", headers={"x-forwarded-for": "10.1.1.1"})).status_code == 200
        assert (await made.http.get("/v1/models", headers={"x-forwarded-for": "10.1.1.1, 8.8.8.8"})).status_code == 403
        assert (await made.http.get("/v1/models")).status_code == 403
        stub = pb_grpc.InferenceServiceStub(made.channel)
        await stub.ListModels(pb.ListModelsRequest(), metadata=(("x-forwarded-for", "10.1.1.1"),))
    async with stack(model_dir, allow_networks="127.0.0.0/8") as made:
        made.say("ok")
        assert (await made.http.post("/v1/completions", json=BODY)).status_code == 200
        async with AsyncClient(made.grpc_address) as client:
            assert (await client.generate("abc")).text == "ok"
            assert "".join([delta.text async for delta in await client.generate("abc", stream=True)]) == "ok"


@in_loop
async def test_f72_no_key_is_in_a_log_or_an_answer(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with stack(model_dir, api_key=KEY) as made:
            made.say("ok")
            told = repr(made.router.config)
            for key in (KEY, "canary-wrong-key"):
                answer = await made.http.post("/v1/completions", json=BODY, headers=bearer(key))
                told += answer.text + str(answer.headers)
                answer = await made.http.post("/v1/completions", content=b"{", headers=bearer(key))
                told += answer.text
            async with AsyncClient(made.grpc_address, api_key="canary-wrong-key") as client:
                with pytest.raises(Unauthenticated) as refused:
                    await client.models()
                told += str(refused.value)
    for secret in (KEY, "canary-wrong-key"):
        assert secret not in caplog.text
        assert secret not in told


@in_loop
async def test_the_port_for_probes_says_how_the_router_is_and_nothing_else(model_dir: Path) -> None:
    async with stack(model_dir, api_key=KEY, allow_networks="10.0.0.0/8", health_port=0) as made:
        base = f"http://127.0.0.1:{made.router.health_port}"
        assert (await made.http.get(f"{base}/health")).status_code == 200
        ready = await made.http.get(f"{base}/ready")
        assert ready.json()["ready"] is True
        for path in ("/metrics", "/v1/models", "/docs", "/openapi.json", "/version"):
            assert (await made.http.get(base + path)).status_code == 404
        assert json.loads((await made.http.get(f"{base}/nothing")).text)["error"]["code"] == 404
