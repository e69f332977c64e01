"""Reasoning and tool calls in an answer's text: every way of cutting the text gives the same pieces."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.replies.formats import FORMATS, HERMES, LLAMA3, MISTRAL, CallFormat, detect_format
from router.replies.output import Reply, ReplySpec
from router.replies.reasoning import REASONING_TAGS, THINK, detect_tags, opens_inside

NAMES = frozenset({"get_weather", "add"})
CALL = '{"name": "get_weather", "arguments": {"city": "Zü\\"rich", "days": [1, {"a": "}"}]}}'
ARGUMENTS = '{"city": "Zü\\"rich", "days": [1, {"a": "}"}]}'
ADD = '{"name": "add", "arguments": {"a": 1}}'


@dataclass
class Joined:
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    is_over: bool = False
    num_deltas: int = 0


def read(spec: ReplySpec, pieces: list[str]) -> Joined:
    reply, joined = Reply(spec), Joined()
    for piece in [*(reply.push(text) for text in pieces), reply.finish()]:
        joined.content += piece.content
        joined.reasoning += piece.reasoning
        for delta in piece.tool_calls:
            joined.num_deltas += 1
            if delta.name:
                assert delta.index == len(joined.calls)
                joined.calls.append((delta.name, delta.arguments))
                joined.ids.append(delta.call_id)
            else:
                assert delta.index == len(joined.calls) - 1
                assert not delta.call_id
                name, arguments = joined.calls[-1]
                joined.calls[-1] = (name, arguments + delta.arguments)
    joined.is_over = reply.is_over
    return joined


def both(form: CallFormat | None, text: str, **more: object) -> Joined:
    """The pieces of a text, given whole and a character at a time."""
    spec = ReplySpec(call_format=form, tool_names=NAMES, **more)  # type: ignore[arg-type]
    whole, split = read(spec, [text]), read(spec, list(text))
    assert (whole.content, whole.reasoning, whole.calls) == (split.content, split.reasoning, split.calls)
    return split


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", [("get_weather", ARGUMENTS)]),
        (
            HERMES,
            f"Let me see.\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{ADD}\n</tool_call>\n",
            "Let me see.",
            [("get_weather", ARGUMENTS), ("add", '{"a": 1}')],
        ),
        (HERMES, f"<tool_call>{ADD}</tool_call>\n\nDone.", "Done.", [("add", '{"a": 1}')]),
        (HERMES, f"<tool_call>{ADD}", "", [("add", '{"a": 1}')]),
        (HERMES, f"<tool_call>{ADD[:-1]}</tool_call>", "", [("add", '{"a": 1}')]),
        (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
        (HERMES, '<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", "{}")]),
        (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}', "", [("add", '{"a": 1}')]),
        (HERMES, '<tool_call>{"id": 7, "x": {"y": [1]}, "name": "add", "arguments": {}}', "", [("add", "{}")]),
        (LLAMA3, '{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
        (LLAMA3, f' \n{ADD}; {{"name": "add", "parameters": {{}}}}', "", [("add", '{"a": 1}'), ("add", "{}")]),
        (LLAMA3, f"<|python_tag|>{ADD}", "", [("add", '{"a": 1}')]),
        (LLAMA3, f"So: <|python_tag|>{ADD}", "So:", [("add", '{"a": 1}')]),
        (MISTRAL, f"[TOOL_CALLS] [{CALL}, {ADD}]", "", [("get_weather", ARGUMENTS), ("add", '{"a": 1}')]),
        (MISTRAL, f"[TOOL_CALLS][{ADD}]", "", [("add", '{"a": 1}')]),
        (MISTRAL, '[TOOL_CALLS]add{"a": 1}', "", [("add", '{"a": 1}')]),
        (
            MISTRAL,
            '[TOOL_CALLS]add[CALL_ID]x[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{}',
            "",
            [("add", '{"a": 1}'), ("add", "{}")],
        ),
    ],
)
def test_calls(form: CallFormat, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    found = both(form, text)
    assert (found.content, found.calls) == (content, calls)
    assert len(set(found.ids)) == len(calls)
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in found.ids) or form is not MISTRAL


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, "no call at all \n"),
        (HERMES, "a < b and <tool_ but not"),
        (HERMES, "The tag\n <tool_call> is written so. "),
        (HERMES, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        (HERMES, '<tool_call>{"name": "add", "arguments": "no json"}</tool_call>'),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": {"x": 1}}'),
        (HERMES, '<tool_call>{"name": "add"'),
        (HERMES, '<tool_call>{name: "add"}'),
        (HERMES, CALL),
        (LLAMA3, '{"a": 1}'),
        (LLAMA3, f"Here: {ADD}"),
        (LLAMA3, "<|python_tag|>print(1)"),
        (MISTRAL, "[TOOL_CALLS] hello there"),
        (MISTRAL, "[TOOL_CALLS] [1, 2]"),
        (MISTRAL, "[TOOL_CALLS]unknown{}"),
        (MISTRAL, "[TOOL_CALLS]" + "x" * 500),
    ],
)
def test_what_only_looks_like_a_call_stays_text(form: CallFormat, text: str) -> None:
    found = both(form, text)
    assert (found.content, found.calls) == (text, [])


def test_a_call_behind_a_false_one_is_found() -> None:
    found = both(HERMES, f"<tool_call> is how. <tool_call>{ADD}</tool_call>")
    assert found.content == "<tool_call> is how."
    assert found.calls == [("add", '{"a": 1}')]


def test_arguments_stream_as_they_come() -> None:
    spec = ReplySpec(call_format=HERMES, tool_names=NAMES)
    found = read(spec, list(f"<tool_call>{CALL}</tool_call>"))
    assert found.num_deltas > len(ARGUMENTS) // 2
    cut = read(spec, ["<tool_call>", CALL[:50]])
    assert cut.calls == [("get_weather", CALL[:50].partition('"arguments": ')[2])]
    assert cut.content == ""


def test_a_reply_with_one_call_is_over_after_it() -> None:
    two = f"<tool_call>{ADD}</tool_call><tool_call>{ADD}</tool_call>"
    one = both(HERMES, two + " and more", parallel_calls=False)
    assert (one.is_over, one.content, len(one.calls)) == (True, "", 1)
    assert not both(HERMES, two).is_over


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nhm, yes\n</think>\n\nFour.", False, "hm, yes", "Four."),
        ("hm, yes\n</think>\n\nFour.", True, "hm, yes", "Four."),
        ("<think>twice</think>Four.", True, "twice", "Four."),
        ("Four.", False, "", "Four."),
        (" \n<thin", False, "", " \n<thin"),
        ("<think>never ends </thi", False, "never ends </thi", ""),
        ("cut ", True, "cut", ""),
        ("</think>Four.", True, "", "Four."),
        ("a <think>b</think>", False, "", "a <think>b</think>"),
        ("<think></think>\n", False, "", ""),
    ],
)
def test_reasoning(text: str, inside: bool, reasoning: str, content: str) -> None:
    found = both(None, text, tags=THINK, begins_inside=inside)
    assert (found.reasoning, found.content) == (reasoning, content)
    hidden = both(None, text, tags=THINK, begins_inside=inside, shows_reasoning=False)
    assert (hidden.reasoning, hidden.content) == ("", content)


def test_calls_are_looked_for_behind_the_reasoning_only() -> None:
    found = both(HERMES, f"<think>a <tool_call>{ADD}</tool_call></think>\n<tool_call>{ADD}</tool_call>", tags=THINK)
    assert found.reasoning == f"a <tool_call>{ADD}</tool_call>"
    assert found.calls == [("add", '{"a": 1}')]


def test_the_prompt_says_whether_the_thinking_is_open() -> None:
    always = REASONING_TAGS["deepseek_r1"]
    assert opens_inside(THINK, "<|assistant|><think>\n")
    assert not opens_inside(THINK, "<think>user text</think><|assistant|>")
    assert not opens_inside(THINK, "<|assistant|><think>\n\n</think>\n\n")
    assert opens_inside(always, "<|assistant|>")
    assert not opens_inside(always, "<|assistant|><think>\n\n</think>\n\n")


def test_formats_are_told_by_their_template() -> None:
    assert detect_format("... <tool_call>\\n{...}") is HERMES
    assert detect_format("[TOOL_CALLS] [") is MISTRAL
    assert detect_format("Environment: ipython ... '\"parameters\": '") is LLAMA3
    assert detect_format("<tool_call>\n<function=f>") is None
    assert detect_format("plain") is None
    assert detect_tags("{{ x.split('</think>') }}") is THINK
    assert detect_tags("plain") is None


ATOMS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", CALL, ADD, "{",
    "}", "[", "]", ",", ";", '"', "\\", ":", " ", "\n", "name", '"name"', '"add"', '"arguments"', "null", "x",
]  # fmt: skip


@given(
    st.sampled_from([None, *FORMATS.values()]),
    st.sampled_from([None, THINK]),
    st.lists(st.sampled_from(ATOMS), max_size=12),
    st.data(),
)
def test_cuts_do_not_matter(form: CallFormat | None, tags: object, atoms: list[str], data: st.DataObject) -> None:
    text = "".join(atoms)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    spec = ReplySpec(call_format=form, tool_names=NAMES, tags=tags)  # type: ignore[arg-type]
    whole, split = read(spec, [text]), read(spec, pieces)
    assert (whole.content, whole.reasoning, whole.calls) == (split.content, split.reasoning, split.calls)
    if not whole.calls and not whole.reasoning and tags is None:
        assert whole.content == text
    for _, arguments in whole.calls:
        assert arguments.startswith("{")


def test_complete_arguments_are_json() -> None:
    for form, opening in ((HERMES, "<tool_call>"), (LLAMA3, ""), (MISTRAL, "[TOOL_CALLS] [")):
        (call,) = both(form, opening + CALL).calls
        assert json.loads(call[1])["city"] == 'Zü"rich'
