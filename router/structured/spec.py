"""What a constrained answer must be, as data: a kind, a text, and where in the request it was said.

Pure. Knows neither the library that compiles grammars nor the fields of any surface (`fields`) nor tools (`tools`).
A text is a client's: it goes to the worker and into refusals of its own request, and never into a log.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from router.errors import InvalidRequest, check_text

DEFAULT_TIMEOUT_S = 1.0
"""Longest check. A worker's step may wait for as long at the grammar's first token; good schemas take milliseconds."""

# Between the parts of a JSON text, as much as a pretty-printer makes. Without an end to it, a model that has nothing to
# say fills all its tokens with blanks.
BOUNDED_WHITESPACE: Mapping[str, object] = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
NO_WHITESPACE: Mapping[str, object] = {"whitespace_flexible": False}


@enum.unique
class GrammarKind(enum.Enum):
    """How a grammar's text is written."""

    JSON_SCHEMA = "json_schema"
    """A JSON Schema (draft 2020-12), as JSON."""
    REGEX = "regex"
    """A regular expression that the whole answer matches; Rust's syntax, without look-around and back-references."""
    LARK = "lark"
    """A context-free grammar in llguidance's variant of Lark, whose rule `start` is the whole answer."""
    EBNF = "ebnf"
    """Lark, or GBNF (rules with `::=`, of which `root` is the whole answer); its check makes it Lark."""


@dataclass(frozen=True)
class GrammarSpec:
    """A grammar as it travels. Two are equal when they allow the same texts by the same words."""

    kind: GrammarKind
    text: str
    field: str = field(compare=False)
    """The path of the request's field that it stands in, for refusals."""


@dataclass(frozen=True)
class Thinking:
    """What the model may think before the text that a grammar describes."""

    opener: str
    closer: str
    opener_id: int | None
    """The token that the opener is, where that is a special one, which no text spells."""
    closer_id: int | None
    is_open: bool
    """The prompt has opened it, so it must be closed; else the answer may go without."""


def schema_text(path: str, schema: Mapping[str, Any], whitespace: Mapping[str, object] = BOUNDED_WHITESPACE) -> str:
    """A JSON Schema as it travels, with how its JSON may be spaced. Raises `InvalidRequest` naming `path`.

    A schema's own "x-guidance" (llguidance's options) comes before `whitespace`.
    """
    own = schema.get("x-guidance")
    options = {**whitespace, **own} if isinstance(own, Mapping) else whitespace
    return json_text(path, {**schema, "x-guidance": options})


def json_text(path: str, value: object) -> str:
    """A client's JSON value written down, in its own order of keys. Raises `InvalidRequest` naming `path`."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        reason = "is nested too deeply" if isinstance(error, RecursionError) else f"is not JSON: {error}"
        raise InvalidRequest(path, f"{path} {reason}") from None
    # JSON may escape a lone surrogate; the text that it stands for cannot travel.
    return check_text(path, text)
