"""The grammar of an answer that must be tool calls, in the form that the model was trained to write them in.

Pure. A surface that is told to require a tool, or one by name, describes the model's form as a `ToolFormat` and gives
the grammar to the request (`GenerationRequest.grammar`); its parser of calls then meets what it would meet without.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.errors import InvalidRequest
from router.structured.spec import GrammarKind, GrammarSpec, schema_text


@dataclass(frozen=True)
class ToolFunction:
    """One callable function. `path` is where its parameters stand in the request, e.g. tools[0].function.parameters."""

    name: str
    parameters: Mapping[str, Any] | None
    """JSON Schema of its arguments; None takes any object."""
    path: str


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls; every text is written exactly so.

        before_all  before_call {"name": NAME, "<arguments_key>": ARGUMENTS} after_call  between_calls …  after_all

    Hermes and Qwen: before_call "<tool_call>\\n", after_call "\\n</tool_call>", between_calls "\\n".
    Llama 3: arguments_key "parameters". Mistral: before_all "[TOOL_CALLS] [", between_calls ", ", after_all "]".
    """

    arguments_key: str = "arguments"
    before_all: str = ""
    before_call: str = ""
    after_call: str = ""
    between_calls: str = ""
    after_all: str = ""
    special_ids: Mapping[str, int] = field(default_factory=dict)
    """Those control tokens of the tokenizer that occur in the texts above, by their text: a special token is only ever
    made as itself, never spelled."""


def spec_for_tools(
    functions: Sequence[ToolFunction], form: ToolFormat, *, parallel: bool, max_calls: int = 16
) -> GrammarSpec:
    """The grammar of one call of one of `functions` (all of them for tool_choice "required", one for a named tool).

    With `parallel`, of one to `max_calls` calls, where the form separates them. Raises `InvalidRequest` for no
    functions, or for parameters that are no JSON object. Whether the schemas compile is found when the request is
    prepared, like that of any other grammar.
    """
    if not functions:
        raise InvalidRequest("tools", "tools is empty: a tool call is required, and there is no tool to call")
    literal = _Literals(form.special_ids)
    num_more = max_calls - 1 if parallel and (form.between_calls or form.before_call) else 0
    more = f" ({literal(form.between_calls)} call)~0..{num_more}" if num_more else ""
    lines = [
        f"start: {literal(form.before_all)} call{more} {literal(form.after_all)}",
        "call: " + " | ".join(f"call_{index}" for index in range(len(functions))),
    ]
    for index, function in enumerate(functions):
        opening = f'{{"name": {json.dumps(function.name)}, {json.dumps(form.arguments_key)}: '
        lines += [
            f"call_{index}: {literal(form.before_call + opening)} arguments_{index} {literal('}' + form.after_call)}",
            f"arguments_{index}: %json {_schema(function)}",
        ]
    return GrammarSpec(GrammarKind.LARK, "\n".join(lines), functions[0].path if len(functions) == 1 else "tools")


def _schema(function: ToolFunction) -> str:
    parameters = function.parameters
    if parameters is None:
        parameters = {"type": "object"}
    if not isinstance(parameters, Mapping):
        raise InvalidRequest(function.path, f"{function.path} must be a JSON Schema object")
    # Arguments are an object whatever a lax schema says: `{}` and {"properties": …} are common.
    return schema_text(function.path, {"type": "object", **parameters})


class _Literals:
    """Exact texts in Lark, with the control tokens in them by id."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        names = sorted(special_ids, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None

    def __call__(self, text: str) -> str:
        pieces = self._split.split(text) if self._split else [text]
        return " ".join(
            f"<[{self._special_ids[piece]}]>" if piece in self._special_ids else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        )
