"""TLS and mTLS on both surfaces, with certificates made here; changed files are taken while serving."""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from octavo.client import AsyncClient, Tls, Unavailable
from octavo.options import OptionError
from octavo.process import StartError
from octavo.tls import ServerTls, TlsFiles, read_material
from router.access.setup import exposures
from router.config import RouterConfig
from tests.fakes.certificates import Authority, Issued
from tests.fakes.router_stack import TEST_TIMEOUT_S, Stack, in_loop, stack

LOOPBACK = "127.0.0.1"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def server_cert(authority: Authority) -> Issued:
    return authority.issue("server")


@contextlib.asynccontextmanager
async def https(made: Stack, ca: str, shown: Issued | None = None) -> AsyncIterator[httpx2.AsyncClient]:
    context = ssl.create_default_context(cafile=ca)
    if shown is not None:
        context.load_cert_chain(shown.cert, shown.key)
    base_url = f"https://{LOOPBACK}:{made.router.http_port}"
    async with httpx2.AsyncClient(base_url=base_url, verify=context, timeout=TEST_TIMEOUT_S) as client:
        yield client


async def grpc_answer(made: Stack, tls: Tls) -> str:
    async with AsyncClient(made.grpc_address, tls=tls) as client:
        return (await client.generate("abc", timeout_s=TEST_TIMEOUT_S)).text


@in_loop
async def test_both_surfaces_speak_tls_and_nothing_else(
    model_dir: Path, authority: Authority, server_cert: Issued, tmp_path: Path
) -> None:
    async with stack(model_dir, tls_cert=server_cert.cert, tls_key=server_cert.key) as made:
        made.say("ok")
        async with https(made, authority.ca) as client:
            answer = await client.post("/v1/completions", json={"prompt": "abc"})
            assert answer.json()["choices"][0]["text"] == "ok"
        assert await grpc_answer(made, Tls(authority.ca)) == "ok"
        with pytest.raises(httpx2.TransportError):
            await made.http.get("/health")
        with pytest.raises(Unavailable):
            async with AsyncClient(made.grpc_address) as plain:
                await plain.models(timeout_s=TEST_TIMEOUT_S)
        stranger = Authority(tmp_path / "other")
        with pytest.raises(httpx2.ConnectError):
            async with https(made, stranger.ca) as client:
                await client.get("/health")
        with pytest.raises(Unavailable):
            await grpc_answer(made, Tls(stranger.ca))


@in_loop
async def test_clients_show_a_certificate_of_the_right_ca(
    model_dir: Path, authority: Authority, server_cert: Issued, tmp_path: Path
) -> None:
    client_ca = Authority(tmp_path / "clients")
    mine, forged = client_ca.issue("client", "client"), Authority(tmp_path / "forger").issue("client", "client")
    files: dict[str, Any] = {"tls_cert": server_cert.cert, "tls_key": server_cert.key, "tls_client_ca": client_ca.ca}
    async with stack(model_dir, health_port=0, **files) as made:
        made.say("ok")
        async with https(made, authority.ca, mine) as client:
            assert (await client.get("/v1/models")).status_code == 200
        assert await grpc_answer(made, Tls(authority.ca, mine.cert, mine.key)) == "ok"
        for shown in (None, forged, server_cert):
            with pytest.raises(httpx2.TransportError):
                async with https(made, authority.ca, shown) as client:
                    await client.get("/health")
            cert, key = (None, None) if shown is None else (shown.cert, shown.key)
            with pytest.raises(Unavailable):
                await grpc_answer(made, Tls(authority.ca, cert, key))
        probe = await made.http.get(f"http://{LOOPBACK}:{made.router.health_port}/ready")
        assert probe.status_code == 200


@in_loop
async def test_a_changed_certificate_is_shown_to_new_connections(
    model_dir: Path, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Authority(tmp_path / "first"), Authority(tmp_path / "second")
    old = first.issue("server")
    async with stack(model_dir, tls_cert=old.cert, tls_key=old.key) as made:
        made.say("ok")
        assert await grpc_answer(made, Tls(first.ca)) == "ok"
        async with https(made, first.ca) as standing:
            assert (await standing.get("/health")).status_code == 200
            new = second.issue("server")
            os.replace(new.cert, old.cert)
            with caplog.at_level(logging.WARNING):
                made.router.access.refresh()  # the new certificate with the old key
            assert "the old ones stay" in caplog.text
            assert await grpc_answer(made, Tls(first.ca)) == "ok"
            os.replace(new.key, old.key)
            made.router.access.refresh()
            assert await grpc_answer(made, Tls(second.ca)) == "ok"
            async with https(made, second.ca) as client:
                assert (await client.get("/health")).status_code == 200
            with pytest.raises(httpx2.ConnectError):
                async with https(made, first.ca) as late:
                    await late.get("/health")
            assert (await standing.get("/health")).status_code == 200


def test_files_that_do_not_go_together_are_named(authority: Authority, server_cert: Issued, tmp_path: Path) -> None:
    other = authority.issue("other")
    with pytest.raises(StartError, match=r"--tls-cert .*server.pem and --tls-key .*other.key do not go together"):
        read_material(TlsFiles(server_cert.cert, other.key, None))
    empty = tmp_path / "empty.pem"
    empty.write_text("nothing")
    with pytest.raises(StartError, match=r"--tls-client-ca .*empty.pem: holds no certificates"):
        read_material(TlsFiles(server_cert.cert, server_cert.key, str(empty)))
    with pytest.raises(StartError, match=r"--tls-cert .*none.pem: cannot be read"):
        ServerTls(TlsFiles(str(tmp_path / "none.pem"), server_cert.key, None))
    assert "PRIVATE" not in repr(read_material(TlsFiles(server_cert.cert, server_cert.key, None)))
    with pytest.raises(ValueError, match=r"--tls-ca .*none.pem"):
        Tls(str(tmp_path / "none.pem")).credentials()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"tls_cert": "a"}, "--tls-key is missing"),
        ({"tls_key": "a"}, "--tls-cert is missing"),
        ({"tls_client_ca": "a"}, "--tls-cert and --tls-key are missing"),
        ({"internal_tls_cert": "a", "internal_tls_key": "b"}, "--internal-tls-ca unset"),
        ({"api_key": " "}, "--api-key"),
        ({"api_key": "a\nb"}, "--api-key"),
        ({"allow_networks": "10.0.0.1/8"}, "--allow-networks 10.0.0.1/8"),
        ({"trusted_proxies": "proxy.example"}, "--trusted-proxies proxy.example"),
    ],
)
def test_options_that_do_not_go_together_are_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(OptionError, match=named):
        RouterConfig(**given)


LOCAL = "tcp://127.0.0.1:0"


@pytest.mark.parametrize(
    ("given", "host", "token_listen", "said"),
    [
        ({}, "127.0.0.1", LOCAL, []),
        ({}, "::1", "ipc:///run/tokens", []),
        ({}, "0.0.0.0", LOCAL, ["open to whoever reaches it without a key", "prompts and answers can be read"]),
        (
            {"allow_networks": "10.0.0.0/8"},
            "10.0.0.1",
            LOCAL,
            ["open to the networks of --allow-networks", "can be read"],
        ),
        ({"api_key": "k"}, "::", LOCAL, ["keys, prompts and answers can be read"]),
        ({"tls_cert": "c", "tls_key": "k"}, "0.0.0.0", LOCAL, ["without a key"]),
        ({"tls_cert": "c", "tls_key": "k", "tls_client_ca": "a"}, "0.0.0.0", LOCAL, []),
        ({"tls_cert": "c", "tls_key": "k", "api_key": "k"}, "0.0.0.0", "tcp://10.0.0.1:7", []),
        ({"zmq_curve": "off"}, "127.0.0.1", "tcp://10.0.0.1:7", ["tokens come in unencrypted"]),
    ],
)
def test_a_start_says_what_is_open(given: dict[str, Any], host: str, token_listen: str, said: list[str]) -> None:
    found = exposures(RouterConfig(**given), host, token_listen)
    assert len(found) == len(said)
    for sentence, part in zip(found, said, strict=True):
        assert part in sentence
