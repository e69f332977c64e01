"""Both kinds of target against a real router over a fake scheduler, and HTTP against servers of every manner."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from octavo.bench.grpc_target import GrpcTarget
from octavo.bench.http import HttpClient, Origin
from octavo.bench.openai_target import OpenAITarget
from octavo.bench.prompts import POOL_TEXT, find_pool
from octavo.bench.records import Answer, AskError, BenchRequest, Target
from octavo.bench.sampling import Sampling
from tests.fakes.router_stack import MODEL, Stack, in_loop, stack, write_text_model


def over_http(made: Stack, sampling: Sampling) -> Target:
    return OpenAITarget(HttpClient(Origin.parse(made.base_url), {}, None), made.base_url, MODEL, sampling, {})


def over_grpc(made: Stack, sampling: Sampling) -> Target:
    return GrpcTarget(made.grpc_address, MODEL, sampling)


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("open_target", [over_http, over_grpc])
def test_a_routers_answer_is_counted(open_target: object, is_chat: bool, tmp_path: Path) -> None:
    @in_loop
    async def run() -> None:
        async with stack(write_text_model(tmp_path / "m")) as made:
            made.say("Hello there")
            target = open_target(made, Sampling(0.0, True, is_chat))  # type: ignore[operator]
            counts: list[int] = []
            answer = await target.ask(BenchRequest("hi", 64, priority=3, cache_salt="s"), counts.append)
            sent = made.scheduler.requests[-1]
            assert answer.num_output_tokens == len("Hello there") + 1  # the end token
            assert answer.num_prompt_tokens == len(sent.prompt_token_ids)
            assert sum(counts) == len("Hello there")
            assert (sent.sampling.max_tokens, list(sent.sampling.end_token_ids)) == (64, [])
            assert (sent.priority, sent.cache_salt) == (3, "s")
            if not is_chat:
                await target.ask(BenchRequest((5, 6, 7), 64), counts.append)
                assert list(made.scheduler.requests[-1].prompt_token_ids) == [5, 6, 7]
            ids = await target.tokenize("tide")
            assert await target.detokenize(ids) == "tide"
            assert await find_pool(target, None) == sorted(set(made.ids(POOL_TEXT)))
            assert await find_pool(target, 3) == [0, 1, 2]
            await target.close()

    run()


@pytest.mark.parametrize(("open_target", "kind"), [(over_http, "HTTP 400"), (over_grpc, "INVALID_ARGUMENT")])
def test_a_refusal_is_told_by_kind_and_words(open_target: object, kind: str, tmp_path: Path) -> None:
    @in_loop
    async def run() -> None:
        async with stack(write_text_model(tmp_path / "m")) as made:
            target = open_target(made, Sampling())  # type: ignore[operator]
            with pytest.raises(AskError, match="max_tokens") as caught:
                await target.ask(BenchRequest("hi", 10_000), lambda num_tokens: None)
            assert caught.value.kind == kind
            await target.close()

    run()


@in_loop
async def test_nobody_there_is_a_failure_of_its_own_kind() -> None:
    http = OpenAITarget(HttpClient(Origin.parse("http://127.0.0.1:1"), {}, None), "x", "m", Sampling(), {})
    with pytest.raises(AskError) as caught:
        await http.ask(BenchRequest("hi", 1), lambda num_tokens: None)
    assert caught.value.kind == "connection"
    grpc = GrpcTarget("127.0.0.1:1", "m", Sampling())
    with pytest.raises(AskError) as caught:
        await grpc.ask(BenchRequest("hi", 1), lambda num_tokens: None)
    assert caught.value.kind == "UNAVAILABLE"
    await grpc.close()


# HTTP ------------------------------------------------------------------------------------------------------------

EVENTS = [
    b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n',
    b'data: {"choices": [{"delta": {"content": "a"}}]}\r\n\r\n: a comment\n\n',
    b'data: {"choices": [{"delta": {"reasoning_content": "b"}}]}\n\n',
    b'data: {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 9, '
    b'"prompt_tokens_details": {"cached_tokens": 2}}}\n\n',
    b"data: [DONE]\n\n",
]


def chunked(*pieces: bytes) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


def sized(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


@contextlib.asynccontextmanager
async def answering(*answers: bytes, closes: bool = False) -> AsyncIterator[tuple[HttpClient, list[bytes]]]:
    """A server that gives one answer after the other, and what it was asked; `closes`: after each one."""
    pending, seen = list(answers), list[bytes]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while pending:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:"))
                seen.append(head.split(b"\r\n")[0] + b" " + await reader.readexactly(length))
                writer.write(pending.pop(0))
                await writer.drain()
                if closes:
                    break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = HttpClient(Origin.parse(f"http://127.0.0.1:{port}/base/"), {"Authorization": "Bearer k"}, None)
    try:
        yield client, seen
    finally:
        client.close()
        server.close()
        await server.wait_closed()


async def ask_chat(client: HttpClient) -> tuple[Answer, int]:
    target = OpenAITarget(client, "x", "m", Sampling(0.0, False, True), {"top_k": 3})
    counts: list[int] = []
    answer = await target.ask(BenchRequest("hi", 9), counts.append)
    return answer, sum(counts)


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_events_are_read_however_they_are_cut(size: int) -> None:
    @in_loop
    async def run() -> None:
        whole = b"".join(EVENTS)
        pieces = [whole[begin : begin + size] for begin in range(0, len(whole), size)]
        for answer in (chunked(*pieces), sized(whole), b"HTTP/1.0 200 OK\r\n\r\n" + whole):
            closes = answer.startswith(b"HTTP/1.0")
            async with answering(answer, closes=closes) as (client, seen):
                assert await ask_chat(client) == (Answer(4, 9, 2), 2)
                line, _, body = seen[0].partition(b" {")
                assert line == b"POST /base/v1/chat/completions HTTP/1.1"
                said = json.loads(b"{" + body)
                assert (said["top_k"], said["stream_options"]) == (3, {"include_usage": True})
                assert "ignore_eos" not in said

    run()


@in_loop
async def test_a_connection_is_used_again_and_replaced_where_the_server_has_closed_it() -> None:
    async with answering(sized(b"1"), sized(b"2"), sized(b"3", headers="Connection: close\r\n")) as (client, seen):
        assert [await client.ask("/a"), await client.ask("/b"), await client.ask("/c")] == [1, 2, 3]
        assert seen[0] == b"GET /base/a HTTP/1.1 "
    async with answering(sized(b"1"), sized(b"2"), closes=True) as (client, _):
        assert await client.ask("/a") == 1
        await asyncio.sleep(0)  # the server's end is on its way
        assert await client.ask("/b") == 2


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (sized(b'{"error": {"message": "full"}}', "429 Too Many"), "HTTP 429", "answered full"),
        (sized(b'{"error": "no"}', "500 Oh"), "HTTP 500", "answered no"),
        (sized(b"", "503 Busy"), "HTTP 503", "answered nothing"),
        (chunked(*EVENTS[:3]), "cut", "without"),
        (chunked(*EVENTS[:3])[:-5] + b"99\r\n", "connection", "ended in its middle"),
        (chunked(b'data: {"error": {"message": "lost"}}\n\n'), "error event", "lost"),
        (chunked(b"data: what\n\n"), "not JSON", "what"),
        (b"SMTP hello\r\n\r\n", "connection", "not an HTTP answer"),
        (b"", "connection", "ended in its middle"),
    ],
)
def test_a_bad_answer_is_a_failure_with_its_cause(answer: bytes, kind: str, words: str) -> None:
    @in_loop
    async def run() -> None:
        async with answering(answer, closes=True) as (client, _):
            with pytest.raises(AskError, match=words) as caught:
                await ask_chat(client)
            assert caught.value.kind == kind

    run()


@in_loop
async def test_the_first_model_is_asked_where_none_is_named() -> None:
    listed = json.dumps({"data": [{"id": "first"}, {"id": "second"}]}).encode()
    async with answering(sized(listed), chunked(*EVENTS)) as (client, seen):
        target = OpenAITarget(client, "x", "", Sampling(), {})
        await target.find_model()
        await target.ask(BenchRequest("hi", 1), lambda num_tokens: None)
        assert b'"model": "first"' in seen[1]
    async with answering(sized(b'{"data": []}')) as (client, _):
        with pytest.raises(AskError, match="name one with --model"):
            await OpenAITarget(client, "x", "", Sampling(), {}).find_model()


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is no URL"):
        Origin.parse(url)
