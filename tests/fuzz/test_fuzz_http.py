"""Requests made from the server's own description of its HTTP API, valid and not: an answer or a refusal, no defect."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.config import GenerationConfig, ProjectConfig, ProjectsConfig, SchemathesisConfig

from router.openai.fields import CHAT_FIELDS, COMPLETION_FIELDS
from router.openai.openapi import CHAT_BODY, COMPLETION_BODY
from tests.fakes.router_stack import Stack, stack
from tests.router.chat_models import write_thinking_model

EXPECTED = {200, 400, 404, 405, 413, 415, 429, 501}
NUM_QUICK, NUM_LONG = 12, 400
_CALL_TIMEOUT_S = 20.0


@pytest.mark.parametrize(
    "mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["as described", "against the description"]
)
def test_a_few_requests(tmp_path: Path, mode: GenerationMode) -> None:
    asyncio.run(_fuzz(tmp_path, mode, NUM_QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_many_requests(tmp_path: Path, mode: GenerationMode) -> None:
    asyncio.run(_fuzz(tmp_path, mode, int(os.environ.get("OCTAVO_FUZZ_EXAMPLES", NUM_LONG))))


@pytest.mark.parametrize(("body", "fields"), [(COMPLETION_BODY, COMPLETION_FIELDS), (CHAT_BODY, CHAT_FIELDS)])
def test_the_description_names_fields_that_are_read(body: dict[str, Any], fields: frozenset[str]) -> None:
    described = body["requestBody"]["content"]["application/json"]["schema"]["properties"].keys()
    assert described <= fields


async def _fuzz(directory: Path, mode: GenerationMode, num_examples: int) -> None:
    async with stack(write_thinking_model(directory)) as made:
        made.say("ok</think>ok")
        description = (await made.http.get("/openapi.json")).json()
        generation = GenerationConfig(modes=[mode])
        config = SchemathesisConfig(projects=ProjectsConfig(default=ProjectConfig(generation=generation)))
        schema = schemathesis.openapi.from_dict(description, config=config)
        for result in schema.get_all_operations():
            operation = result.ok()
            if operation.body:
                await asyncio.to_thread(_check(operation, made, mode, num_examples))
        assert (await made.http.get("/health")).status_code == 200
        answer = await made.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 4})
        assert answer.status_code == 200


def _check(operation: Any, made: Stack, mode: GenerationMode, num_examples: int) -> Callable[[], None]:
    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        answer = case.call(base_url=made.base_url, timeout=_CALL_TIMEOUT_S)
        assert answer.status_code in EXPECTED, (case.method, case.path, case.body, answer.content)
        if answer.status_code == 400:
            assert b"message" in answer.content

    return check  # type: ignore[no-any-return]
