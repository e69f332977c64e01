"""The fields that say what an answer must be: what each becomes, and what is refused by its path."""

import json
from typing import Any

import pytest

from octavo.v1 import inference_pb2 as pb
from router.errors import InvalidRequest
from router.structured.fields import MAX_CHOICES, read_grammar
from router.structured.message import read_structured_output
from router.structured.spec import GrammarKind, GrammarSpec

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}, "required": ["b"]}
WRAPPED = {"name": "thing", "schema": SCHEMA, "strict": True}


def schema_of(spec: GrammarSpec | None) -> Any:
    assert spec is not None
    assert spec.kind is GrammarKind.JSON_SCHEMA
    return json.loads(spec.text)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": WRAPPED}}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "structured_outputs.json"),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"}, "guided_json"),
    ],
)
def test_a_schema_keeps_its_order_and_gets_a_bound_on_blanks(given: dict[str, Any], field: str) -> None:
    spec = read_grammar(given)
    assert spec is not None
    assert spec.field == field
    found = schema_of(spec)
    assert "{1,32}" in found.pop("x-guidance")["whitespace_pattern"]
    assert list(found["properties"]) == ["b", "a"]
    assert found == SCHEMA


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}}, {"whitespace_flexible": False}),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " ?"}}, {"whitespace_pattern": " ?"}),
        ({"guided_json": {}, "guided_whitespace_pattern": " ?"}, {"whitespace_pattern": " ?"}),
        ({"guided_json": {"x-guidance": {"whitespace_pattern": " "}}}, {"whitespace_pattern": " "}),
    ],
)
def test_whitespace_is_the_clients_to_choose(given: dict[str, Any], options: dict[str, Any]) -> None:
    assert schema_of(read_grammar(given))["x-guidance"] == options


@pytest.mark.parametrize(
    "given",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
        {"guided_json_object": True},
    ],
)
def test_json_object_is_a_schema(given: dict[str, Any]) -> None:
    assert schema_of(read_grammar(given))["type"] == "object"


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"structured_outputs": {"regex": "a+"}}, GrammarKind.REGEX, "a+"),
        ({"guided_regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, GrammarKind.EBNF, "root ::= x"),
        ({"guided_grammar": "start: x"}, GrammarKind.EBNF, "start: x"),
        ({"guided_choice": ["né", 'a"b', "né"]}, GrammarKind.LARK, r'start: "né" | "a\"b"'),
        ({"structured_outputs": {"choice": ["a"], "disable_fallback": True}}, GrammarKind.LARK, 'start: "a"'),
    ],
)
def test_the_other_kinds(given: dict[str, Any], kind: GrammarKind, text: str) -> None:
    spec = read_grammar(given)
    assert spec is not None
    assert (spec.kind, spec.text) == (kind, text)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"response_format": {"type": "text"}},
        {"guided_decoding_backend": "auto"},
        {"guided_json_object": False},
    ],
)
def test_a_free_answer(given: dict[str, Any]) -> None:
    assert read_grammar(given) is None


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {**WRAPPED, "strict": "yes"}}},
            "response_format.json_schema.strict",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {**WRAPPED, "schema": 3}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
        ),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[" * 100_000}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": True}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "\ud800"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]"),
        ({"structured_outputs": {"choice": ["a"] * (MAX_CHOICES + 1)}}, "structured_outputs.choice"),
        ({"guided_grammar": 3}, "guided_grammar"),
        # Two that constrain.
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.json"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
    ],
)
def test_what_is_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_grammar(given)
    assert refused.value.field == field
    assert field in refused.value.message


def test_the_grpc_forms_are_the_same() -> None:
    def read(**constraint: Any) -> GrammarSpec | None:
        return read_structured_output(pb.SamplingParams(structured_output=pb.StructuredOutput(**constraint)))

    assert read_structured_output(pb.SamplingParams()) is None
    assert read(json_schema=json.dumps(SCHEMA)) == read_grammar({"guided_json": SCHEMA})
    assert read(json_object=True) == read_grammar({"guided_json_object": True})
    assert read(regex="a") == read_grammar({"guided_regex": "a"})
    assert read(choice=pb.TextChoice(texts=["a", "b"])) == read_grammar({"guided_choice": ["a", "b"]})
    assert read(grammar="start: x") == read_grammar({"guided_grammar": "start: x"})
    for constraint in ({}, {"json_object": False}):
        with pytest.raises(InvalidRequest, match="structured_output constrains nothing"):
            read(**constraint)
