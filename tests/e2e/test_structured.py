"""A real model is held to schemas, expressions and choices through three real processes."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import openai
import pytest

from tests.e2e.stack import Stack

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 1, "maximum": 99_999_999},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 2},
    },
    "required": ["city", "population", "rivers"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "Describe Paris as JSON: city, population and rivers."}]


@pytest.fixture(scope="module")
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.http}/v1", api_key="none")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_fits_its_schema(client: openai.OpenAI, temperature: float) -> None:
    answer = client.chat.completions.create(
        model="",
        messages=QUESTION,  # type: ignore[arg-type]
        temperature=temperature,
        seed=7,
        max_tokens=300,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": SCHEMA, "strict": True},
        },
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)


def test_constrained_and_free_answers_run_together_as_they_do_alone(client: openai.OpenAI) -> None:
    constraints = [
        {},
        {"regex": r"[A-Z][a-z]{3,9} [0-9]{2}"},
        {"choice": ["yes", "no", "perhaps"]},
        {"grammar": 'root ::= term ("+" term)? \nterm ::= [0-9] [0-9]?'},
        {"json": SCHEMA},
        {"json_object": True},
    ]

    def ask(constraint: dict[str, object]) -> str:
        body = {"structured_outputs": constraint} if constraint else {}
        answer = client.completions.create(
            model="", prompt="My answer is: ", max_tokens=48, temperature=1.0, seed=3, extra_body=body
        )
        return answer.choices[0].text

    alone = [ask(constraint) for constraint in constraints]
    with ThreadPoolExecutor(len(constraints)) as pool:
        together = list(pool.map(ask, constraints))
    assert together == alone
    assert re.fullmatch(r"[A-Z][a-z]{3,9} [0-9]{2}", alone[1])
    assert alone[2] in ("yes", "no", "perhaps")
    assert re.fullmatch(r"\d\d?(\+\d\d?)?", alone[3])
    assert alone[5].startswith("{")
