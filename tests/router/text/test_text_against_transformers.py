"""Token ids and rendered chats equal transformers' on a corpus, for every style of tokenizer and template."""

import functools
import json
import random
from pathlib import Path

import pytest
from conftest import TextModel
from text_models import CORPUS
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from router.text.prompt import ChatOptions
from router.text.tokenizer import control_strings

TEXTS = [
    *CORPUS[:5],
    "",
    " ",
    "   leading",
    "trailing   ",
    "\n\n\nlines\n\n\t tabs \u00a0nbsp",
    "NUL \x00 inside",
    "e\u0301 versus \u00e9, \uff41\uff42, ﬁ",
    "🌶👩‍🚀 " * 3,
    "a" * 300,
    "<b>html</b> <ordinary_word> a<|b <|notatoken|> >< [x] \ue000\uf8ff",
    "1234567890 3.14159",
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Größe & <size>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "maximum": 20000000000}}},
        },
    }
]
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Paris", "n": [1, 2.5, None]}},
}


@functools.cache
def load_oracle(directory: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(str(directory))


def hf(model: TextModel) -> PreTrainedTokenizerBase:
    return load_oracle(model.directory)


def conversations() -> dict[str, list[dict[str, object]]]:
    plain = [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": "Hi there! 1234 a < b"},
        {"role": "assistant", "content": " Hello, café 🌶 "},
        {"role": "user", "content": "And now?\n\n  Go on. "},
    ]
    tools = [
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny & 20°"},
    ]
    return {"one": plain[1:2], "system": plain[:2], "many": plain, "tools": tools}


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_text_ids_equal(text_model: TextModel, add_special_tokens: bool) -> None:
    oracle = hf(text_model)
    for text in TEXTS:
        expected = oracle(text, add_special_tokens=add_special_tokens)["input_ids"]
        assert text_model.tokenizer.encode(text, add_special_tokens=add_special_tokens) == expected, text


def test_random_text_with_control_strings_equals(text_model: TextModel) -> None:
    oracle = hf(text_model)
    pieces = [*(token.content for token in text_model.tokenizer.added_tokens.values()), *TEXTS, " ", "\n"]
    rng = random.Random(5)
    for _ in range(60):
        text = "x" + "".join(rng.choices(pieces, k=6))
        assert (
            text_model.tokenizer.encode(text, add_special_tokens=False)
            == oracle(text, add_special_tokens=False)["input_ids"]
        )


def test_decode_equals(text_model: TextModel) -> None:
    oracle = hf(text_model)
    for text in TEXTS:
        ids = oracle(text)["input_ids"]
        assert text_model.tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True), text
        assert text_model.tokenizer.decode(ids, skip_special_tokens=False) == oracle.decode(ids), text


@pytest.mark.parametrize("name", ["one", "system", "many"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_equals(text_model: TextModel, name: str, add_generation_prompt: bool) -> None:
    check_chat_equals(text_model, name, add_generation_prompt)


@pytest.mark.parametrize("model_name", ["qwen", "llama3"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_with_tools_equals(
    text_models: dict[str, TextModel], model_name: str, add_generation_prompt: bool
) -> None:
    check_chat_equals(text_models[model_name], "tools", add_generation_prompt)


def check_chat_equals(text_model: TextModel, name: str, add_generation_prompt: bool) -> None:
    messages = conversations()[name]
    expected_messages = messages
    if text_model.name == "parts":  # transformers passes a string through; a loop over its characters shows nothing
        expected_messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    tools = TOOLS if name == "tools" else None
    oracle = hf(text_model)
    options = ChatOptions(tools=tools, add_generation_prompt=add_generation_prompt)
    text = oracle.apply_chat_template(
        expected_messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    ids = oracle.apply_chat_template(
        expected_messages, tools=tools, add_generation_prompt=add_generation_prompt, return_dict=False
    )
    prompt = text_model.prompts.chat(messages, options)
    assert prompt.text == text
    assert list(prompt.token_ids) == ids


def holds_control_string(model: TextModel, text: str) -> bool:
    controls = control_strings(model.tokenizer, model.templates.pick(has_tools=False).literal_text)
    return any(control in text for control in controls)


@pytest.mark.parametrize("content", TEXTS)
def test_chat_content_equals(text_model: TextModel, content: str) -> None:
    if holds_control_string(text_model, content):
        content = content.replace("tool_call>", "tool-call>")
        assert not holds_control_string(text_model, content)
    oracle = hf(text_model)
    messages = [{"role": "user", "content": content}]
    expected = (
        [{"role": "user", "content": [{"type": "text", "text": content}]}] if text_model.name == "parts" else messages
    )
    ids = oracle.apply_chat_template(expected, add_generation_prompt=True, return_dict=False)
    assert list(text_model.prompts.chat(messages).token_ids) == ids


@pytest.mark.parametrize("ending", ["goes on", "goes on   ", "ends with a < b", "multi\nline\n"])
def test_continued_chat_equals(text_model: TextModel, ending: str) -> None:
    oracle = hf(text_model)
    messages = [{"role": "user", "content": "Tell a < story"}, {"role": "assistant", "content": ending}]
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    given = parts if text_model.name == "parts" else messages
    expected = oracle.apply_chat_template(given, tokenize=False, continue_final_message=True)
    prompt = text_model.prompts.chat(messages, ChatOptions(continue_final_message=True))
    assert prompt.text == expected
    assert list(prompt.token_ids) == oracle(expected, add_special_tokens=False)["input_ids"]


def test_template_variables_and_reasoning_equal(text_models: dict[str, TextModel]) -> None:
    model = text_models["qwen"]
    oracle = hf(model)
    messages = [{"role": "user", "content": "hi"}]
    for thinking in (True, False):
        expected = oracle.apply_chat_template(
            messages, add_generation_prompt=True, enable_thinking=thinking, return_dict=False
        )
        options = ChatOptions(template_kwargs={"enable_thinking": thinking})
        assert list(model.prompts.chat(messages, options).token_ids) == expected


def test_rendered_text_with_inspected_strings_equals(text_models: dict[str, TextModel]) -> None:
    """History with thinking in it: the template splits there, and the text is transformers' to the character."""
    model = text_models["qwen"]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nlong <b>thought</b>\n</think>\n\nanswer < 5"},
        {"role": "user", "content": "b"},
    ]
    expected = hf(model).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = model.prompts.chat(messages)
    assert prompt.text == expected
    assert "thought" not in prompt.text


def test_default_model_uses_its_template(text_models: dict[str, TextModel]) -> None:
    prompt = text_models["default"].prompts.chat([{"role": "user", "content": "Hi"}])
    assert prompt.text is not None
    assert prompt.text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert json.loads((text_models["default"].directory / "tokenizer.json").read_text())["model"]["type"] == "BPE"
