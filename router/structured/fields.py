"""The fields of a JSON request that say what its answer must be, read into one `GrammarSpec`.

Knows OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*` names. They all say the same,
so only one may say it. Takes what `json.loads` gave and trusts no type. Whether a grammar compiles is not asked here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from router.errors import InvalidRequest, check_text, show_value
from router.sampling_rules import check_flag
from router.structured.spec import BOUNDED_WHITESPACE, NO_WHITESPACE, GrammarKind, GrammarSpec, json_text, schema_text

GRAMMAR_FIELDS = frozenset(
    (
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "guided_json_object",
        "guided_whitespace_pattern",
        "guided_decoding_backend",
    )
)
"""Every field that `read_grammar` reads. `guided_decoding_backend` has no effect: there is one."""

MAX_CHOICES = 1024
_OLD_PREFIX = "guided_"
# Options of structured_outputs beside its constraint; those that only steer vLLM's choice of a library have no effect.
_OPTIONS = frozenset(
    ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties", "disable_fallback")
)


def read_grammar(given: Mapping[str, Any]) -> GrammarSpec | None:
    """The grammar that a request's fields ask for, None for a free answer.

    Raises InvalidRequest naming the field: for two that constrain, for a wrong type, and for what is not supported.
    """
    found = [spec for spec in (_response_format(given), *_structured_outputs(given), *_guided(given)) if spec]
    if len(found) > 1:
        raise InvalidRequest(
            found[1].field, f"{found[1].field} and {found[0].field} both constrain the answer; give only one of them"
        )
    return found[0] if found else None


def json_schema(path: str, value: object, whitespace: Mapping[str, object] = BOUNDED_WHITESPACE) -> GrammarSpec:
    """A JSON Schema, as an object or as its JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(check_text(path, value))
        except ValueError as error:
            raise InvalidRequest(path, f"{path} is not JSON: {error}") from None
        except RecursionError:
            raise InvalidRequest(path, f"{path} is nested too deeply") from None
    if not isinstance(value, Mapping):
        raise InvalidRequest(path, f"{path} must be a JSON Schema object, got {show_value(value)}")
    return GrammarSpec(GrammarKind.JSON_SCHEMA, schema_text(path, value, whitespace), path)


def json_object(path: str, value: object, whitespace: Mapping[str, object] = BOUNDED_WHITESPACE) -> GrammarSpec | None:
    """Any JSON object, where the flag is true."""
    return json_schema(path, {"type": "object"}, whitespace) if check_flag(path, value, default=False) else None


def regex(path: str, value: object) -> GrammarSpec:
    """A regular expression."""
    return GrammarSpec(GrammarKind.REGEX, _filled_text(path, value), path)


def choice(path: str, value: object) -> GrammarSpec:
    """One of several texts."""
    if not isinstance(value, (list, tuple)) or not 1 <= len(value) <= MAX_CHOICES:
        raise InvalidRequest(path, f"{path} must be a list of 1 to {MAX_CHOICES} strings, got {show_value(value)}")
    texts = [json_text(f"{path}[{i}]", _filled_text(f"{path}[{i}]", item)) for i, item in enumerate(value)]
    return GrammarSpec(GrammarKind.LARK, f"start: {' | '.join(dict.fromkeys(texts))}", path)


def grammar(path: str, value: object) -> GrammarSpec:
    """Lark or GBNF."""
    return GrammarSpec(GrammarKind.EBNF, _filled_text(path, value), path)


_Reader = Callable[[str, Any], GrammarSpec | None]
_PLAIN_READERS: Mapping[str, _Reader] = {"regex": regex, "choice": choice, "grammar": grammar}


def _response_format(given: Mapping[str, Any]) -> GrammarSpec | None:
    path = "response_format"
    value = given.get(path)
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    match kind:
        case "text":
            return None
        case "json_object" if value.get("schema") is not None:  # as llama.cpp's server and others take a schema
            return json_schema(f"{path}.schema", value["schema"])
        case "json_object":
            return json_object(path, True)
        case "json_schema":
            return _openai_schema(value.get("json_schema"))
        case _:
            raise InvalidRequest(
                f"{path}.type" if isinstance(value, Mapping) else path,
                f"{path}.type must be text, json_object or json_schema, got {show_value(kind if kind else value)}",
            )


def _openai_schema(value: object) -> GrammarSpec:
    """OpenAI's wrapper. `strict` changes nothing: a schema is always enforced whole."""
    path = "response_format.json_schema"
    if not isinstance(value, Mapping):
        raise InvalidRequest(path, f"{path} must be an object with name and schema, got {show_value(value)}")
    if not isinstance(value.get("name"), str) or not value["name"]:
        raise InvalidRequest(f"{path}.name", f"{path}.name must be a string, got {show_value(value.get('name'))}")
    check_flag(f"{path}.strict", value.get("strict"), default=False)
    if value.get("schema") is None:
        raise InvalidRequest(f"{path}.schema", f"{path}.schema is missing")
    return json_schema(f"{path}.schema", value["schema"])


def _structured_outputs(given: Mapping[str, Any]) -> list[GrammarSpec | None]:
    path = "structured_outputs"
    value = given.get(path)
    if value is None:
        return []
    if not isinstance(value, Mapping):
        raise InvalidRequest(path, f"{path} must be an object, got {show_value(value)}")
    asked = {name: item for name, item in value.items() if item is not None and item is not False}
    known = {*_PLAIN_READERS, "json", "json_object"}
    for name in asked.keys() - known - _OPTIONS:
        field = f"{path}.{show_value(name)[1:-1]}"
        raise InvalidRequest(field, f"{field} is not supported; use one of {', '.join(sorted(known))}")
    if "disable_additional_properties" in asked:
        raise InvalidRequest(
            f"{path}.disable_additional_properties",
            f"{path}.disable_additional_properties is not supported; "
            'write "additionalProperties": false into the schema',
        )
    if not asked.keys() & known:
        raise InvalidRequest(path, f"{path} constrains nothing; give one of {', '.join(sorted(known))}")
    compact = check_flag(f"{path}.disable_any_whitespace", asked.get("disable_any_whitespace"), default=False)
    pattern = asked.get("whitespace_pattern")
    return _constraints(f"{path}.", asked, whitespace_of(f"{path}.whitespace_pattern", pattern, compact=compact))


def _guided(given: Mapping[str, Any]) -> list[GrammarSpec | None]:
    """vLLM's older names: guided_json is structured_outputs.json, and so on."""
    asked = {
        name.removeprefix(_OLD_PREFIX): value
        for name, value in given.items()
        if name in GRAMMAR_FIELDS and name.startswith(_OLD_PREFIX) and value is not None
    }
    path = f"{_OLD_PREFIX}whitespace_pattern"
    return _constraints(_OLD_PREFIX, asked, whitespace_of(path, asked.get("whitespace_pattern"), compact=False))


def _constraints(prefix: str, asked: Mapping[str, Any], whitespace: Mapping[str, object]) -> list[GrammarSpec | None]:
    found = [read(prefix + name, asked[name]) for name, read in _PLAIN_READERS.items() if name in asked]
    if "json" in asked:
        found.append(json_schema(f"{prefix}json", asked["json"], whitespace))
    if "json_object" in asked:
        found.append(json_object(f"{prefix}json_object", asked["json_object"], whitespace))
    return found


def whitespace_of(path: str, pattern: object, *, compact: bool) -> Mapping[str, object]:
    """How JSON may be spaced: as the pattern says, else not at all where it shall be `compact`, else within bounds."""
    if pattern is not None:
        return {"whitespace_pattern": _filled_text(path, pattern)}
    return NO_WHITESPACE if compact else BOUNDED_WHITESPACE


def _filled_text(path: str, value: object) -> str:
    if not check_text(path, value):
        raise InvalidRequest(path, f"{path} must not be empty")
    return str(value)
