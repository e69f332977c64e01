"""Messages, content parts, tool calls, and completions prompts: what is accepted, and how a refusal names the place."""

import json
import subprocess
import sys
from typing import Any

import pytest
from conftest import TextModel

from router.errors import InvalidRequest, RequestTooLarge
from router.text.prompt import ChatOptions, PromptBuilder


def refused(model: TextModel, messages: object, **options: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        model.prompts.chat(messages, ChatOptions(**options))
    assert caught.value.message.startswith(caught.value.field.split("[")[0])
    return caught.value


def text_parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("role", ["system", "user"])
def test_f22_parts_are_joined_by_newline_for_a_string_template(text_models: dict[str, TextModel], role: str) -> None:
    prompts = text_models["smollm"].prompts
    parts = prompts.chat([{"role": role, "content": text_parts("AA", "BB")}])
    assert parts == prompts.chat([{"role": role, "content": "AA\nBB"}])
    assert parts.text is not None
    assert "{'type'" not in parts.text
    assert prompts.chat([{"role": role, "content": []}]) == prompts.chat([{"role": role, "content": ""}])


def test_f22_parts_are_passed_to_a_template_that_loops(text_models: dict[str, TextModel]) -> None:
    for name in ("gemma", "parts"):
        prompts = text_models[name].prompts
        parts = prompts.chat([{"role": "user", "content": text_parts("AA", "BB")}])
        assert parts == prompts.chat([{"role": "user", "content": "AABB"}])


def test_f22_tool_content_may_be_parts(text_models: dict[str, TextModel]) -> None:
    prompts = text_models["qwen"].prompts
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}]
    parts = prompts.chat([*turns, {"role": "tool", "content": text_parts("AA", "BB")}])
    assert parts == prompts.chat([*turns, {"role": "tool", "content": "AA\nBB"}])


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "foo"}, "content[1].type"),
        ({"type": "text"}, "content[1].text"),
        ({"type": "text", "text": 5}, "content[1].text"),
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}}, "content[1].type"),
        ({"text": "x"}, "content[1].type"),
        (7, "content[1]"),
        ({"type": ["text"], "text": "x"}, "content[1].type"),
    ],
)
def test_f22_bad_parts(text_model: TextModel, part: object, field: str) -> None:
    error = refused(text_model, [{"role": "user", "content": [*text_parts("ok"), part]}])
    assert error.field == f"messages[0].{field}"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (None, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": "a\ud83d b"}], "messages[0].content"),
        ([{"role": "user", "content": "x", "name": "\udc00"}], "messages[0].name"),
        ([{"role": "user", "content": "x", "extra": float("nan")}], "messages[0].extra"),
        ([{"role": "assistant", "tool_calls": 5}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name"),
    ],
)
def test_bad_messages(text_models: dict[str, TextModel], messages: object, field: str) -> None:
    assert refused(text_models["qwen"], messages).field == field


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}, ' {"a":1}\n'])
def test_f24_arguments_become_a_mapping(text_models: dict[str, TextModel], arguments: object) -> None:
    text = tool_turn(text_models["qwen"], arguments)
    assert '"arguments": {"a": 1}}' in text
    assert "<tool_response>\nok\n</tool_response>" in text


@pytest.mark.parametrize("arguments", ["", "null", None, "{}", "  "])
def test_absent_arguments_are_empty(text_models: dict[str, TextModel], arguments: object) -> None:
    assert '"arguments": {}}' in tool_turn(text_models["qwen"], arguments)


@pytest.mark.parametrize(
    "arguments", ["[]", "{bad", "5", '"x"', [], 7, "[" * 100_000, '{"a": NaN}', '{"a":' * 100 + "1" + "}" * 100]
)
def test_f24_other_arguments_are_refused(text_models: dict[str, TextModel], arguments: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tool_turn(text_models["qwen"], arguments)
    assert caught.value.field.startswith("messages[1].tool_calls[0]")


def tool_turn(model: TextModel, arguments: object) -> str:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
    ]
    text = model.prompts.chat(messages).text
    assert text is not None
    return text


def test_tools_must_be_functions(text_models: dict[str, TextModel]) -> None:
    user = [{"role": "user", "content": "x"}]
    for tools in (5, [5], [{"type": "x"}], [{"type": "function"}], [{"type": "function", "function": {"name": ""}}]):
        assert refused(text_models["qwen"], user, tools=tools).field.startswith("tools")
    nested: object = 1
    for _ in range(100):
        nested = {"a": nested}
    tools = [{"type": "function", "function": {"name": "f", "parameters": nested}}]
    assert "nested" in refused(text_models["qwen"], user, tools=tools).message


def test_a_refusal_is_what_an_assistant_said(text_models: dict[str, TextModel]) -> None:
    prompts, question = text_models["smollm"].prompts, {"role": "user", "content": "q"}
    answer = {"role": "assistant", "content": None, "refusal": "no", "tool_calls": None}
    told = prompts.chat([question, answer, question])
    assert told == prompts.chat([question, {"role": "assistant", "content": "no"}, question])
    error = refused(text_models["smollm"], [question, {"role": "assistant", "refusal": 5}])
    assert error.field == "messages[1].refusal"


def test_calls_and_results_may_be_said_as_before_tools(text_models: dict[str, TextModel]) -> None:
    prompts, question = text_models["qwen"].prompts, {"role": "user", "content": "q"}
    function = {"name": "f", "arguments": '{"a": 1}'}
    before = [
        {"role": "assistant", "content": None, "function_call": function},
        {"role": "function", "name": "f", "content": "ok"},
    ]
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    now = [call, {"role": "tool", "name": "f", "content": "ok"}]
    assert prompts.chat([question, *before]) == prompts.chat([question, *now])
    for wrong, field in (("f", "function_call"), ({"name": "f", "arguments": "{bad"}, "function_call.arguments")):
        error = refused(text_models["qwen"], [question, {"role": "assistant", "function_call": wrong}])
        assert error.field == f"messages[1].{field}"


def test_documents_need_a_template_that_shows_them(text_models: dict[str, TextModel]) -> None:
    question = [{"role": "user", "content": "q"}]
    assert refused(text_models["smollm"], question, documents=[{"text": "t"}]).field == "documents"
    assert text_models["smollm"].prompts.chat(question, ChatOptions(documents=[])).text


def test_a_developer_is_a_system_to_templates_that_know_none(text_models: dict[str, TextModel]) -> None:
    prompts = text_models["smollm"].prompts
    assert prompts.chat([{"role": "developer", "content": "x"}]) == prompts.chat([{"role": "system", "content": "x"}])


def test_the_template_may_refuse_the_order_of_roles(text_models: dict[str, TextModel]) -> None:
    error = refused(text_models["mistral"], [{"role": "assistant", "content": "a < b"}])
    assert "alternate" in error.message


def test_continuing_excludes_a_new_turn(text_models: dict[str, TextModel]) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    error = refused(text_models["smollm"], messages, add_generation_prompt=True, continue_final_message=True)
    assert error.field == "add_generation_prompt"
    parts = [messages[0], {"role": "assistant", "content": []}]
    assert refused(text_models["parts"], parts, continue_final_message=True).field == "continue_final_message"


def test_chat_begins_with_one_bos(text_models: dict[str, TextModel]) -> None:
    for name in ("llama3", "mistral", "gemma", "legacy_llama"):
        model = text_models[name]
        prompt = model.prompts.chat([{"role": "user", "content": "x"}])
        assert prompt.token_ids[:1] == (model.tokenizer.bos_id,)
        assert model.tokenizer.bos_id not in prompt.token_ids[1:]
        assert prompt.text is not None
        assert model.prompts.completion(prompt.text).token_ids[:2].count(model.tokenizer.bos_id or -1) == 1


def test_f28_empty_completion_needs_a_token_of_the_tokenizer(text_models: dict[str, TextModel]) -> None:
    assert text_models["llama3"].prompts.completion("").token_ids == (text_models["llama3"].tokenizer.bos_id,)
    with pytest.raises(InvalidRequest, match="empty"):
        text_models["default"].prompts.completion("")


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ([""], "prompt[0]"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ([-1], "prompt[0]"),
        ([1, "V"], "prompt[1]"),
        (["V"], "prompt[0]"),
        ([2**31], "prompt[0]"),
        ([10**400], "prompt[0]"),
        ([1.5], "prompt[0]"),
        ([True], "prompt[0]"),
        (["a", [1]], "prompt[1]"),
        ([[1], "a"], "prompt[1]"),
        ([[1], [1, -5]], "prompt[1][1]"),
        (None, "prompt"),
        (5, "prompt"),
        ({"a": 1}, "prompt"),
        ("a\ud83d b", "prompt"),
        (["ok", "\udfff"], "prompt[1]"),
    ],
)
def test_bad_completion_prompts(text_models: dict[str, TextModel], prompt: Any, field: str) -> None:
    model = text_models["default"]
    if isinstance(prompt, list) and prompt[-1:] == ["V"]:
        prompt = [*prompt[:-1], model.tokenizer.vocab_size] if len(prompt) > 1 else [model.tokenizer.vocab_size]
    with pytest.raises(InvalidRequest) as caught:
        model.prompts.completions(prompt)
    assert caught.value.field == field
    assert caught.value.codes.grpc_status == "INVALID_ARGUMENT"


def test_completion_prompts(text_models: dict[str, TextModel]) -> None:
    prompts = text_models["default"].prompts
    assert [p.token_ids for p in prompts.completions([5, 6])] == [(5, 6)]
    assert [p.token_ids for p in prompts.completions([[5], [6]])] == [(5,), (6,)]
    assert [p.text for p in prompts.completions(["a", "b\x00"])] == ["a", "b\x00"]
    assert len(prompts.completions("x")) == 1


def test_text_that_cannot_fit_is_refused_before_it_is_encoded(text_models: dict[str, TextModel]) -> None:
    tokenizer = text_models["smollm"].tokenizer
    prompts = PromptBuilder(
        tokenizer, text_models["smollm"].templates, vocab_size=tokenizer.vocab_size, max_model_len=8
    )
    huge = "x" * (prompts.max_text_chars + 1)
    for call in (lambda: prompts.completion(huge), lambda: prompts.chat([{"role": "user", "content": huge}])):
        with pytest.raises(RequestTooLarge, match="characters") as caught:
            call()
        assert caught.value.codes.http_status == 413
    with pytest.raises(InvalidRequest, match="9 tokens"):
        prompts.completion([1] * 9)


def test_importing_the_text_side_brings_no_heavy_library() -> None:
    code = (
        "import sys, json, router.text.prompt, router.sampling, router.errors;"
        "import router.text.detokenize, router.text.stop;"
        "print(json.dumps([m for m in ('torch','numpy','transformers','grpc') if m in sys.modules]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == []
