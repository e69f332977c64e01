"""A router with its real surfaces in this event loop, over a fake scheduler, and a model directory without weights."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec

import grpc.aio
import httpx2

from octavo.internal.v1 import types_pb2
from octavo.sources import tokenizer_hash
from router.config import RouterConfig
from router.server import Router, running
from router.text.tokenizer import Tokenizer
from tests.fakes.scheduler import Behaviour, FakeScheduler, speak
from tests.fakes.tiny_tokenizers import END_TOKEN, Style, tiny_tokenizer

P = ParamSpec("P")

MODEL, CONTEXT = "tiny", 256
TURN = "<|turn|>"
TEST_TIMEOUT_S = 60.0
CHAT_TEMPLATE = (
    "{% for message in messages %}" + TURN + "{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}" + TURN + "assistant:{% endif %}"
)


def write_text_model(
    directory: Path,
    pieces: Sequence[str | bytes] = (),
    style: Style = "byte_level",
    template: str = CHAT_TEMPLATE,
    specials: Sequence[str] = (),
) -> Path:
    """A model directory with a tokenizer and no weights: all that a router reads.

    Ids: end 0, turn 1, other specials, bytes, pieces.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer(pieces, style, [TURN, *specials]).save(str(directory / "tokenizer.json"))
    config = {"eos_token": END_TOKEN, **({"chat_template": template} if template else {})}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 0}), encoding="utf-8")
    return directory


def model_info(directory: Path, name: str = MODEL) -> types_pb2.ModelInfo:
    """What a worker would say of that model."""
    return types_pb2.ModelInfo(
        name=name,
        fingerprint="f",
        tokenizer_hash=tokenizer_hash(directory),
        vocab_size=Tokenizer.load(directory).vocab_size,
        max_model_len=CONTEXT,
        end_token_ids=[0],
        numerics="n1",
        batch_invariant=True,
    )


@dataclass
class Stack:
    """What a test talks to and looks at."""

    router: Router
    scheduler: FakeScheduler
    scheduler_port: int
    http: httpx2.AsyncClient
    channel: grpc.aio.Channel
    tokenizer: Tokenizer

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.router.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.router.grpc_port}"

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def say(self, text: str, chunk: int = 1) -> None:
        """Let the model answer with this text, a byte a token, and its end token."""
        self.scheduler.behave = speak(self.ids(text), chunk)

    async def until_ready(self, ready: bool = True) -> None:
        """Wait until the router's readiness is so."""
        changed = asyncio.Event()
        self.router.scheduler.on_change(lambda state: changed.set())
        while self.router.front.readiness().ready is not ready:
            changed.clear()
            await changed.wait()


@contextlib.asynccontextmanager
async def stack(
    directory: Path, behave: Behaviour | None = None, *, wait: bool = True, **config: Any
) -> AsyncIterator[Stack]:
    """Everything on free loopback ports, stopped on the way out."""
    scheduler = FakeScheduler(model_info(directory), behave or speak([]))
    port = await scheduler.start()
    settings = RouterConfig(
        model=str(directory),
        served_model_name=MODEL,
        http_port=0,
        grpc_port=0,
        scheduler_address=f"127.0.0.1:{port}",
        **config,
    )
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.push_async_callback(scheduler.stop)
        router = await cleanup.enter_async_context(running(settings))
        http = await cleanup.enter_async_context(
            httpx2.AsyncClient(base_url=f"http://127.0.0.1:{router.http_port}", timeout=TEST_TIMEOUT_S)
        )
        channel = await cleanup.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{router.grpc_port}"))
        text = router.front.catalogue.text(MODEL)
        assert text is not None
        made = Stack(router, scheduler, port, http, channel, text.tokenizer)
        if wait:
            await made.until_ready()
        yield made


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test in an event loop of its own, with a time limit."""
    return in_loop_within(TEST_TIMEOUT_S)(test)


def in_loop_within(
    limit_s: float,
) -> Callable[[Callable[P, Coroutine[Any, Any, None]]], Callable[P, None]]:
    """`in_loop` with another limit, for what other programs have a part in."""

    def wrap(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
        @functools.wraps(test)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            asyncio.run(asyncio.wait_for(test(*args, **kwargs), limit_s))

        return run

    return wrap
