"""Clients of another language over real sockets: the TypeScript example (Connect, gRPC-Web), grpc-js (native gRPC)."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.rpc import error_details_pb2, status_pb2

from tests.fakes.router_stack import MODEL, in_loop_within, stack
from tests.fakes.scheduler import hang

Install = Callable[[Path], None]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXAMPLE = ROOT / "examples" / "typescript"
TEST_LIMIT_S = 120.0
TEXT = "héllo 👋 wörld\n"


@pytest.fixture(scope="session")
def example(install: Install, node_environment: dict[str, str]) -> Path:
    """The built example."""
    install(EXAMPLE)
    sources = [EXAMPLE / "package-lock.json", EXAMPLE / "tsconfig.json", EXAMPLE / "buf.gen.yaml"]
    sources += [*(EXAMPLE / "src").glob("*.ts"), *(ROOT / "protos" / "octavo" / "v1").glob("*.proto")]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sorted(sources))).hexdigest()
    stamp = EXAMPLE / "dist" / ".sources"
    if not stamp.is_file() or stamp.read_text() != digest:
        built = subprocess.run(
            ["npm", "run", "build"], cwd=EXAMPLE, env=node_environment, capture_output=True, text=True, timeout=300
        )
        assert built.returncode == 0, built.stdout + built.stderr
        stamp.write_text(digest)
    return EXAMPLE / "dist" / "chat.js"


@pytest.fixture(scope="session")
def grpc_client(install: Install) -> Path:
    install(HERE)
    return HERE / "grpc_chat.mjs"


async def node(script: Path, *words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        "node", str(script), *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


async def run(script: Path, *words: str) -> tuple[int | None, str, str]:
    """(exit status, standard output, standard error)."""
    process = await node(script, *words)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("protocol", ["connect", "grpc-web"])
@in_loop_within(TEST_LIMIT_S)
async def test_the_example_streams_and_names_errors(example: Path, model_dir: Path, protocol: str) -> None:
    async with stack(model_dir, api_key="k") as made:
        made.say(TEXT)
        words = ("--url", made.base_url, "--protocol", protocol, "--temperature")
        assert await run(example, *words, "0", "--key", "k", "hi", "you") == (0, TEXT + "\n", "")
        assert made.scheduler.requests[-1].sampling.temperature == 0
        assert made.tokenizer.decode(list(made.scheduler.requests[-1].prompt_token_ids)).count("user: hi you\n") == 1
        for key, temperature, word in (("wrong", "0", "Unauthenticated"), ("k", "9", "InvalidArgument: temperature")):
            code, out, err = await run(example, *words, temperature, "--key", key, "hi")
            assert (code, out) == (1, "")
            assert err.startswith(word)


@pytest.mark.parametrize("protocol", ["connect", "grpc-web"])
@in_loop_within(TEST_LIMIT_S)
async def test_the_example_stops_what_the_server_does(example: Path, model_dir: Path, protocol: str) -> None:
    async with stack(model_dir, hang) as made:
        process = await node(example, "--url", made.base_url, "--protocol", protocol, "hi")
        assert process.stdout is not None
        assert await process.stdout.readexactly(1) == b"x"
        process.send_signal(2)
        await made.scheduler.until(lambda: len(made.scheduler.cancelled) == 1)
        await made.router.front.wait_idle()
        assert await process.wait() == 0


def request(**sampling: Any) -> str:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], "sampling": sampling})


@in_loop_within(TEST_LIMIT_S)
async def test_grpc_js_streams_a_chat(grpc_client: Path, model_dir: Path) -> None:
    async with stack(model_dir, api_key="k") as made:
        made.say(TEXT)
        words = (str(ROOT / "protos"), made.grpc_address)
        code, out, err = await run(grpc_client, *words, request(maxTokens=50), "k", "0")
        assert (code, err) == (0, "")
        *events, end = map(json.loads, out.splitlines())
        assert end["status"]["code"] == 0
        assert "".join(event["delta"]["text"] for event in events if event["event"] == "delta") == TEXT
        assert [event["event"] for event in events][-2:] == ["finished", "usage"]
        assert events[-2]["finished"]["finishReason"] == "FINISH_REASON_STOP"
        assert {event["model"] for event in events} == {MODEL}
        assert made.scheduler.requests[-1].sampling.max_tokens == 50


@in_loop_within(TEST_LIMIT_S)
async def test_grpc_js_reads_refusals_and_cancels(grpc_client: Path, model_dir: Path) -> None:
    async with stack(model_dir, hang) as made:
        words = (str(ROOT / "protos"), made.grpc_address)
        _, out, _ = await run(grpc_client, *words, request(temperature=9), "", "0")
        status = json.loads(out)["status"]
        assert status["code"] == 3
        packed = status_pb2.Status.FromString(base64.b64decode(status["packed"]))
        bad = error_details_pb2.BadRequest()
        assert packed.details[0].Unpack(bad)
        assert bad.field_violations[0].field == "temperature"
        _, out, _ = await run(grpc_client, *words, request(), "", "1")
        assert json.loads(out.splitlines()[-1])["status"]["code"] == 1
        await made.scheduler.until(lambda: len(made.scheduler.cancelled) == 1)
        await made.router.front.wait_idle()
