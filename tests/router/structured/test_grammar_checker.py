"""Grammars are compiled in processes of their own: what is wrong is said, and what crashes or hangs them is refused."""

import asyncio
import json
import os
import signal

import pytest

from octavo.internal.v1 import types_pb2
from router.errors import InvalidRequest
from router.structured.check_process import MAX_ERROR_CHARS, byte_vocabulary, check
from router.structured.checker import GrammarChecker
from router.structured.fields import choice, grammar, json_schema, regex
from router.structured.spec import GrammarSpec
from router.structured.tools import ToolFormat, ToolFunction, spec_for_tools
from tests.fakes.router_stack import in_loop

# Rules that each begin with the next: the library's recursion overflows its stack.
DEEP = "start: r0\n" + "\n".join(f'r{i}: "x" | r{i + 1}' for i in range(20_000)) + '\nr20000: "z"'
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTIONS = [ToolFunction("weather", CITY, "tools[0]"), ToolFunction('say "hi"', None, "tools[1]")]


async def error_of(checker: GrammarChecker, spec: GrammarSpec) -> str:
    with pytest.raises(InvalidRequest) as refused:
        await checker.check(spec)
    assert refused.value.field == "the.field"
    return refused.value.message


@in_loop
async def test_what_is_wrong_is_said_with_its_place() -> None:
    checker = GrammarChecker()
    try:
        for spec, said in (
            (regex("the.field", "ab(c"), "unclosed group, at character 2"),
            (regex("the.field", "é(?=a)"), "look-around, including look-ahead and look-behind, is not supported"),
            (regex("the.field", r"(a)\1"), "backreferences are not supported, at character 3"),
            (
                json_schema("the.field", {"properties": {"if": {}, "a/b": {"anyOf": [{}, {"items": {"if": {}}}]}}}),
                'cannot be enforced: at /properties/a~1b/anyOf/1/items: Unimplemented keys: ["if"]',
            ),
            (json_schema("the.field", {"type": "strong"}), "cannot be enforced: Invalid type: strong"),
            (json_schema("the.field", {"enum": []}), "Unsatisfiable schema"),
            (grammar("the.field", 'start: "a" | b'), 'line 1, column 8: unknown name: "b"'),
            (grammar("the.field", 'root ::= "a" | b'), "Rule 'b' not found"),
            (regex("the.field", r"[^\s\S]"), "it allows no text at all"),
        ):
            assert said in await error_of(checker, spec)
    finally:
        await checker.close()


@in_loop
async def test_what_is_remembered_is_bounded_in_bytes() -> None:
    checker = GrammarChecker(max_bytes=2_000)
    try:
        for length in (700, 800, 700, 900):
            assert (await checker.check(regex("f", "a" * length))).text
        assert checker.num_remembered == 2
        assert (await checker.check(regex("f", "b" * 3_000))).text
        assert checker.num_remembered == 0
    finally:
        await checker.close()


@in_loop
async def test_what_is_right_goes_on_as_workers_take_it() -> None:
    checker = GrammarChecker()
    try:
        assert (await checker.check(regex("f", "a+"))).kind == types_pb2.GRAMMAR_KIND_REGEX
        gbnf = await checker.check(grammar("f", 'root ::= "a" | [0-9]+'))
        assert gbnf.kind == types_pb2.GRAMMAR_KIND_LARK
        assert "start:" in gbnf.text
        lark = await checker.check(grammar("f", "start: /a+/"))
        assert lark == types_pb2.Grammar(kind=types_pb2.GRAMMAR_KIND_LARK, text="start: /a+/")
        assert (await checker.check(choice("f", ["a", "日本"]))).text == 'start: "a" | "日本"'
    finally:
        await checker.close()


@in_loop
async def test_f66_one_that_crashes_its_process_is_refused_and_others_go_on() -> None:
    checker = GrammarChecker()
    try:
        bad = asyncio.create_task(error_of(checker, grammar("the.field", DEEP)))
        await checker.check(regex("f", "a"))
        assert "takes more time, memory or nesting" in await bad
        for text in ("b", "c", "d"):
            await checker.check(regex("f", text))
    finally:
        await checker.close()


@in_loop
async def test_a_process_that_was_killed_meanwhile_is_no_grammars_fault() -> None:
    checker = GrammarChecker()
    try:
        for text in ("a", "b"):  # one after another: by the same process
            await checker.check(regex("f", text))
            for process in checker.processes:
                os.kill(process.pid, signal.SIGKILL)
                await process.wait()
    finally:
        await checker.close()


@in_loop
async def test_f66_one_that_lasts_too_long_is_refused() -> None:
    checker = GrammarChecker(timeout_s=0.001)
    try:
        slow = (
            "start: "
            + " ".join(f"r{i}" for i in range(900))
            + "".join(f"\nr{i}: /[a-z]{{1,{i + 1}}}/" for i in range(900))
        )
        assert "(0.001 s, --grammar-timeout)" in await error_of(checker, grammar("the.field", slow))
    finally:
        await checker.close()


FORMATS = {
    "hermes": ToolFormat(before_call="<tool_call>\n", after_call="\n</tool_call>", between_calls="\n"),
    "llama": ToolFormat(arguments_key="parameters", between_calls="; "),
    "mistral": ToolFormat(
        before_all="[TOOL_CALLS] [", between_calls=", ", after_all="]", special_ids={"[TOOL_CALLS]": 300}
    ),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("parallel", [False, True])
def test_grammars_of_tool_calls_compile(name: str, parallel: bool) -> None:
    spec = spec_for_tools(FUNCTIONS, FORMATS[name], parallel=parallel)
    wire = types_pb2.Grammar(kind=types_pb2.GRAMMAR_KIND_LARK, text=spec.text)
    assert check(byte_vocabulary(), wire).grammar == wire


def test_tools_that_are_none_or_no_schemas_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="tools is empty"):
        spec_for_tools([], FORMATS["hermes"], parallel=False)
    with pytest.raises(InvalidRequest, match="must be a JSON Schema object"):
        spec_for_tools([ToolFunction("f", ["a"], "tools[0]")], FORMATS["hermes"], parallel=False)  # type: ignore[arg-type]


def test_errors_are_short() -> None:
    wire = types_pb2.Grammar(kind=types_pb2.GRAMMAR_KIND_JSON_SCHEMA, text=json.dumps({"type": "x" * 10_000}))
    assert 0 < len(check(byte_vocabulary(), wire).error) <= MAX_ERROR_CHARS
