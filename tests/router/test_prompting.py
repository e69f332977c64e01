"""Which prompts are built on the event loop, and that the refusals of both ways are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.client import AsyncClient, InvalidArgument
from router.prompting import MAX_QUICK_IDS, is_quick
from router.requests import ChatPrompt, CompletionPrompt, GenerationRequest
from tests.fakes.router_stack import CONTEXT, in_loop, stack


@pytest.mark.parametrize(
    ("value", "quick"),
    [
        ([1] * MAX_QUICK_IDS, True),
        ([1] * (MAX_QUICK_IDS + 1), False),
        ("x", False),
        ([[1]], False),
        (["x"], False),
        ([True], False),
        (7, False),
    ],
)
def test_a_few_ids_are_quick(value: object, quick: bool) -> None:
    assert is_quick(GenerationRequest(CompletionPrompt(value))) is quick


def test_a_conversation_is_not_quick() -> None:
    assert not is_quick(GenerationRequest(ChatPrompt([])))


@in_loop
async def test_too_many_ids_are_refused_alike_on_both_ways(model_dir: Path) -> None:
    async with stack(model_dir) as made, AsyncClient(made.grpc_address) as client:
        for count in (MAX_QUICK_IDS, MAX_QUICK_IDS + 1):
            with pytest.raises(InvalidArgument, match=f"prompt has {count} tokens; the context has {CONTEXT}"):
                await client.generate([3] * count)
        with pytest.raises(InvalidArgument, match=r"prompt\[2\].*1000000"):
            await client.generate([3, 3, 1_000_000])
        assert made.scheduler.requests == []
