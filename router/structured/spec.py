"""What a constrained answer must be, as data: a kind, a text, and where in the request it was said.

Pure. Knows neither the library that compiles grammars nor the fields of any surface (`fields`) nor tools (`tools`).
A text is a client's: it goes to the worker and into refusals of its own request, and never into a log.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field

from router.errors import InvalidRequest


@enum.unique
class GrammarKind(enum.Enum):
    """How a grammar's text is written."""

    JSON_SCHEMA = "json_schema"
    """A JSON Schema (draft 2020-12), as JSON."""
    REGEX = "regex"
    """A regular expression that the whole answer matches; Rust's syntax, without look-around and back-references."""
    LARK = "lark"
    """A context-free grammar in llguidance's variant of Lark, whose rule `start` is the whole answer."""


@dataclass(frozen=True)
class GrammarSpec:
    """A grammar as it travels. Two are equal when they allow the same texts by the same words."""

    kind: GrammarKind
    text: str
    field: str = field(compare=False)
    """The path of the request's field that it stands in, for refusals."""


def json_text(path: str, value: object) -> str:
    """A client's JSON value written down, in its own order of keys. Raises `InvalidRequest` naming `path`."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        reason = "is nested too deeply" if isinstance(error, RecursionError) else f"is not JSON: {error}"
        raise InvalidRequest(path, f"{path} {reason}") from None
