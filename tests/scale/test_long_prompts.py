"""A prompt of five megabytes holds up nobody else: rendering and encoding it happen beside the event loop."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from octavo.sources import resolve
from tests.fakes.router_stack import Stack, stack
from tests.fakes.scheduler import speak
from tests.scale.loop_watch import watching

NUM_BYTES = 5 * 2**20
CONTEXT_OF_MILLIONS = 2**21
LONGEST_STALL_S = 0.2
TIMEOUT_S = 120.0
TEXT = ("The quick brown fox jumps over the lazy dog. " * (NUM_BYTES // 45 + 1))[:NUM_BYTES]
CASES = {
    "text": ("/v1/completions", {"prompt": TEXT}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
    "ids": ("/v1/completions", {"prompt": [40_007] * (NUM_BYTES // len("40007, "))}),
}


@pytest.mark.parametrize("name", ["chat", "ids", pytest.param("text", marks=pytest.mark.slow)])
def test_f30_a_long_prompt_stalls_nobody(name: str) -> None:
    asyncio.run(asyncio.wait_for(_answer(*CASES[name]), TIMEOUT_S))


async def _answer(path: str, body: dict[str, Any]) -> None:
    async with stack(resolve("default").directory, speak([5])) as made:
        await _allow_long_prompts(made)
        raw = await asyncio.to_thread(lambda: json.dumps({**body, "max_tokens": 1}).encode())
        reader, writer = await asyncio.open_connection("127.0.0.1", made.router.http_port)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
        async with watching() as watch:
            writer.write(head.encode() + raw)
            status = await reader.readline()
            while await reader.read(2**16):
                pass
        writer.close()
        assert b" 200 " in status, status
        assert watch.num_beats > 1
        assert watch.longest_stall_s < LONGEST_STALL_S


async def _allow_long_prompts(made: Stack) -> None:
    changed = asyncio.Event()
    made.router.scheduler.on_change(lambda state: changed.set())
    made.scheduler.info.max_model_len = CONTEXT_OF_MILLIONS
    made.scheduler.announce()
    await changed.wait()
