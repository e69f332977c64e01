"""A client's chat messages and tools, checked and put into the shape that chat templates expect.

Knows OpenAI's message format and transformers' conventions (keys whose value is null are dropped; tool-call arguments
are mappings; reasoning goes by several names). Knows no template but for how it reads content, and no tokens. Every
refusal names the path, e.g. `messages[2].tool_calls[0].function.arguments`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from router.errors import InvalidRequest, check_text, show_value
from router.text.chat_template import ContentUse

MAX_NESTING = 64
STANDARD_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_TEXT_PART_TYPES = frozenset({"text", "input_text", "output_text"})
_MEDIA_PART = re.compile(r"(input_)?(image|audio|video|file)(_url)?")


def normalize_messages(messages: object, use: ContentUse, accepts_role: Callable[[str], bool]) -> list[dict[str, Any]]:
    """The conversation as the template gets it: fresh dicts and lists of plain values. Raises `InvalidRequest`.

    `accepts_role` decides on roles beyond `STANDARD_ROLES`.
    """
    if not _is_list(messages) or not messages:
        raise InvalidRequest("messages", f"messages must be a list of at least one message, got {show_value(messages)}")
    result = []
    for index, message in enumerate(messages):
        field = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise InvalidRequest(field, f"{field} must be an object, got {show_value(message)}")
        result.append(_normalize_message(field, message, use, accepts_role))
    return result


def normalize_tools(tools: object) -> list[dict[str, Any]] | None:
    """The tools as given, checked to be functions with a name; None for none."""
    if tools is None:
        return None
    if not _is_list(tools):
        raise InvalidRequest("tools", f"tools must be a list, got {show_value(tools)}")
    for index, tool in enumerate(tools):
        field = f"tools[{index}]"
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise InvalidRequest(f"{field}.type", f"{field} must be an object of type 'function'")
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidRequest(f"{field}.function.name", f"{field}.function needs a name")
    plain: list[dict[str, Any]] | None = plain_data("tools", tools) or None
    return plain


def write_out_calls(message: dict[str, Any], use: ContentUse) -> dict[str, Any]:
    """A normalized message for a template that knows no tool calls: they are content, one JSON object a line.

    Without them the result of a call would answer nothing, and a turn without content breaks most such templates.
    """
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    lines = [json.dumps({"name": f["name"], "arguments": f["arguments"]}, ensure_ascii=False) for f in functions]
    content = message.get("content", [] if use.iterates_parts else "")
    if isinstance(content, list):
        return {**message, "content": [*content, *({"type": "text", "text": line} for line in lines)]}
    return {**message, "content": "\n".join(filter(None, (content, *lines)))}


def plain_data(field: str, value: object, depth: int = 0) -> Any:
    """A deep copy of JSON data. Refuses lone surrogates, infinite numbers, and nesting past `MAX_NESTING`."""
    if depth > MAX_NESTING:
        raise InvalidRequest(field, f"{field} is nested deeper than {MAX_NESTING} levels")
    if isinstance(value, str):
        return check_text(field, value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidRequest(field, f"{field} must be a finite number, got {value}")
        return value
    if isinstance(value, Mapping):
        return {
            check_text(f"{field} key", key): plain_data(f"{field}.{show_value(key)[1:-1]}", item, depth + 1)
            for key, item in value.items()
        }
    if _is_list(value):
        return [plain_data(f"{field}[{index}]", item, depth + 1) for index, item in enumerate(value)]
    raise InvalidRequest(field, f"{field} must be JSON data, got a {type(value).__name__}")


def _normalize_message(
    field: str, message: Mapping[str, Any], use: ContentUse, accepts_role: Callable[[str], bool]
) -> dict[str, Any]:
    given = {key: value for key, value in message.items() if value is not None}
    role = given.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role) or not (role in STANDARD_ROLES or accepts_role(role)):
        known = ", ".join(sorted(STANDARD_ROLES))
        raise InvalidRequest(
            f"{field}.role",
            f"{field}.role must be one of {known} or a role of the model's template, got {show_value(role)}",
        )
    result: dict[str, Any] = {}
    if "content" not in given and "refusal" in given:
        result["content"] = _normalize_content(f"{field}.refusal", given["refusal"], use)
    for key, value in given.items():
        if key == "content":
            result[key] = _normalize_content(f"{field}.content", value, use)
        elif key == "tool_calls":
            if calls := _normalize_tool_calls(f"{field}.tool_calls", value):  # none at all, to any template
                result[key] = calls
        elif key == "function_call" and not given.get("tool_calls"):  # as OpenAI's API said it before tools
            call = {"type": "function", "function": _normalize_function(f"{field}.function_call", value)}
            result["tool_calls"] = [call]
        else:
            result[key] = plain_data(f"{field}.{key}", value)
    if "content" not in result and "tool_calls" not in result:
        raise InvalidRequest(
            f"{field}.content", f"{field}.content must be text; only a message with tool_calls may lack it"
        )
    reasoning = next((result[key] for key in _REASONING_KEYS if key in result), None)
    return result if reasoning is None else {"thinking": reasoning, **result, "reasoning_content": reasoning}


def _normalize_content(field: str, content: object, use: ContentUse) -> str | list[dict[str, str]]:
    """Text for a template that takes strings, parts for one that loops over them."""
    if isinstance(content, str):
        text = check_text(field, content)
        needs_parts = use.iterates_parts and not use.tells_types_apart
        return [{"type": "text", "text": text}] if needs_parts else text
    if not _is_list(content):
        raise InvalidRequest(field, f"{field} must be a string or a list of parts, got {show_value(content)}")
    texts = [_text_of_part(f"{field}[{index}]", part) for index, part in enumerate(content)]
    if use.iterates_parts:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _text_of_part(field: str, part: object) -> str:
    if isinstance(part, str):
        return check_text(field, part)
    if not isinstance(part, Mapping):
        raise InvalidRequest(field, f"{field} must be an object with a type, got {show_value(part)}")
    kind = part.get("type")
    if isinstance(kind, str) and kind in _TEXT_PART_TYPES:
        return check_text(f"{field}.text", part.get("text"))
    if kind == "refusal":
        return check_text(f"{field}.refusal", part.get("refusal"))
    if isinstance(kind, str) and _MEDIA_PART.fullmatch(kind):
        raise InvalidRequest(f"{field}.type", f"{field}.type {kind!r}: this model takes text only; nothing was fetched")
    raise InvalidRequest(f"{field}.type", f"{field}.type must be 'text', got {show_value(kind)}")


def _normalize_tool_calls(field: str, calls: object) -> list[dict[str, Any]]:
    if not _is_list(calls):
        raise InvalidRequest(field, f"{field} must be a list, got {show_value(calls)}")
    result = []
    for index, call in enumerate(calls):
        path = f"{field}[{index}]"
        if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
            raise InvalidRequest(path, f"{path} must be an object with a function")
        plain: dict[str, Any] = plain_data(path, {key: value for key, value in call.items() if key != "function"})
        result.append({**plain, "function": _normalize_function(f"{path}.function", call["function"])})
    return result


def _normalize_function(field: str, function: object) -> dict[str, Any]:
    """A call's function with its arguments as a mapping."""
    if not isinstance(function, Mapping):
        raise InvalidRequest(field, f"{field} must be an object with a name, got {show_value(function)}")
    check_text(f"{field}.name", function.get("name"))
    arguments = _parse_arguments(f"{field}.arguments", function.get("arguments"))
    plain: dict[str, Any] = plain_data(field, {**function, "arguments": arguments})
    return plain


def _parse_arguments(field: str, arguments: object) -> dict[str, Any]:
    """Arguments as a mapping, parsed if they come as JSON text. Nothing, "" and null are no arguments."""
    if isinstance(arguments, str):
        check_text(field, arguments)
        try:
            arguments = json.loads(arguments) if arguments.strip() else None
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(field, f"{field} is not valid JSON: {error}") from None
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(field, f"{field} must be a JSON object, got {show_value(arguments)}")
    return dict(arguments)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (list, tuple))
