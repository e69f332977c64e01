"""The tools of a request: which functions may be called, and whether one must be.

Takes what a client sent and trusts no type; every refusal names the path. Knows no template and no model's format of
calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.errors import InvalidRequest, show_value
from router.sampling_rules import check_flag
from router.structured.tools import ToolFunction
from router.text.messages import normalize_tools

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class ToolUse:
    """What a request wants of its tools. No functions: it has none, or wants none called."""

    functions: tuple[ToolFunction, ...] = ()
    forced: tuple[ToolFunction, ...] = ()
    """The answer must be a call of one of these; empty where it is free."""
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.functions)


NO_TOOLS = ToolUse()


def read_tool_use(tools: object, tool_choice: object, parallel_tool_calls: object) -> ToolUse:
    """Check a request's tools, and what it says of them. Raises `InvalidRequest` naming the path."""
    functions = tuple(_function(index, tool) for index, tool in enumerate(normalize_tools(tools) or ()))
    seen: set[str] = set()
    for index, function in enumerate(functions):
        if function.name in seen:
            path = f"tools[{index}].function.name"
            raise InvalidRequest(path, f"{path}: {show_value(function.name)} is the name of another tool too")
        seen.add(function.name)
    parallel = check_flag("parallel_tool_calls", parallel_tool_calls, default=True)
    match tool_choice:
        case None | "auto":
            return ToolUse(functions, (), parallel)
        case "none":
            return NO_TOOLS
        case "required":
            return ToolUse(functions, _needed(functions), parallel)
        case {"type": "function", "function": {"name": str(name)}}:
            found = _named("tool_choice.function.name", name, functions)
            return ToolUse(functions, (found,), parallel)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as few}}:
            path = "tool_choice.allowed_tools.tools"
            by_name = dict(_allowed(f"{path}[{index}]", tool, functions) for index, tool in enumerate(few))
            allowed = tuple(by_name.values())
            return ToolUse(allowed, allowed if mode == "required" else (), parallel)
    raise InvalidRequest(
        "tool_choice",
        "tool_choice must be 'none', 'auto', 'required', {'type': 'function', 'function': {'name': …}} or "
        "{'type': 'allowed_tools', 'allowed_tools': {'mode': 'auto' or 'required', 'tools': […]}}, "
        f"got {show_value(tool_choice)}",
    )


def _allowed(path: str, tool: object, functions: tuple[ToolFunction, ...]) -> tuple[str, ToolFunction]:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name, _named(f"{path}.function.name", name, functions)
    raise InvalidRequest(path, f"{path} must be {{'type': 'function', 'function': {{'name': …}}}}")


def _named(path: str, name: str, functions: tuple[ToolFunction, ...]) -> ToolFunction:
    for function in _needed(functions):
        if function.name == name:
            return function
    raise InvalidRequest(path, f"{path} must be one of the tools, got {show_value(name)}")


def _needed(functions: tuple[ToolFunction, ...]) -> tuple[ToolFunction, ...]:
    if not functions:
        raise InvalidRequest("tool_choice", "tool_choice asks for a call, but the request has no tools")
    return functions


def _function(index: int, tool: Mapping[str, Any]) -> ToolFunction:
    function, path = tool["function"], f"tools[{index}].function"
    if not _NAME.fullmatch(function["name"]):
        raise InvalidRequest(
            f"{path}.name",
            f"{path}.name must have 1 to 64 characters of A-Z, a-z, 0-9, '_', '.' and '-', "
            f"got {show_value(function['name'])}",
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidRequest(
            f"{path}.parameters", f"{path}.parameters must be a JSON Schema object, got {show_value(parameters)}"
        )
    return ToolFunction(function["name"], parameters, f"{path}.parameters")
