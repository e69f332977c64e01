"""What a caller gives, as octavo.v1's requests, for both the blocking and the asyncio client.

Messages and tools are in OpenAI's form, so that what is written for one API serves the other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from octavo.v1 import inference_pb2 as pb

Message: TypeAlias = Mapping[str, Any]

_OUTPUT_FIELDS = frozenset(
    {
        "logprobs",
        "prompt_logprobs",
        "include_special_tokens",
        "include_stop_string",
        "echo",
        "hide_reasoning",
    }
)
_REQUEST_FIELDS = frozenset({"request_id", "priority", "cache_salt", "adapter", "user"})
_OWN_FIELDS = frozenset(
    {
        "add_special_tokens",
        "truncate_prompt_tokens",
        "parallel_tool_calls",
        "add_generation_prompt",
        "continue_final_message",
    }
)
_JSON_FIELDS = {"template_variables": "template_variables_json", "documents": "documents_json"}
_TOOL_MODES = {
    "auto": pb.TOOL_CHOICE_MODE_AUTO,
    "none": pb.TOOL_CHOICE_MODE_NONE,
    "required": pb.TOOL_CHOICE_MODE_REQUIRED,
}


def generate_request(prompt: str | Sequence[int], model: str, options: Mapping[str, Any]) -> pb.GenerateRequest:
    """A request for text or token ids. Raises TypeError or ValueError for what the schema cannot carry."""
    request = pb.GenerateRequest(model=model, **_parts(options))
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
        request.token_ids.SetInParent()
    return request


def chat_request(messages: Sequence[Message], model: str, options: Mapping[str, Any]) -> pb.ChatRequest:
    """A request for a conversation. Raises TypeError or ValueError for what the schema cannot carry."""
    others = dict(options)
    tools, choice = others.pop("tools", ()), others.pop("tool_choice", None)
    return pb.ChatRequest(
        model=model,
        messages=map(_message, messages),
        tools=map(_tool, tools),
        tool_choice=_tool_choice(choice),
        **_parts(others),
    )


def tokenize_request(prompt: str | Sequence[Message], model: str, options: Mapping[str, Any]) -> pb.TokenizeRequest:
    """A request for the tokens of text, or of a conversation with the options of `chat`."""
    if not isinstance(prompt, str):
        return pb.TokenizeRequest(model=model, chat=chat_request(prompt, model, options))
    return pb.TokenizeRequest(model=model, text=prompt, **options)


def _message(message: Message) -> pb.ChatMessage:
    known = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
    if "reasoning_content" in known:
        known["reasoning"] = known.pop("reasoning_content")
    calls = [
        pb.ToolCall(id=call.get("id", ""), name=call["function"]["name"], arguments_json=call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    return pb.ChatMessage(**known, tool_calls=calls)


def _tool(tool: Mapping[str, Any]) -> pb.Tool:
    function = tool["function"]
    parameters = function.get("parameters")
    return pb.Tool(
        name=function["name"],
        description=function.get("description", ""),
        parameters_json="" if parameters is None else json.dumps(parameters, ensure_ascii=False),
    )


def _tool_choice(choice: str | Mapping[str, Any] | None) -> pb.ToolChoice | None:
    if choice is None:
        return None
    if isinstance(choice, str):
        if choice not in _TOOL_MODES:
            raise ValueError(f"tool_choice must be one of {', '.join(_TOOL_MODES)} or name a function, got {choice!r}")
        return pb.ToolChoice(mode=_TOOL_MODES[choice])
    return pb.ToolChoice(name=choice["function"]["name"])


def _structured(asked: Mapping[str, Any]) -> pb.StructuredOutput:
    made = dict(asked)
    if isinstance(made.get("json_schema"), Mapping):
        made["json_schema"] = json.dumps(made["json_schema"], ensure_ascii=False)
    if "choice" in made:
        made["choice"] = pb.TextChoice(texts=made["choice"])
    return pb.StructuredOutput(**made)


def _parts(options: Mapping[str, Any]) -> dict[str, Any]:
    elsewhere = _OUTPUT_FIELDS | _REQUEST_FIELDS | _OWN_FIELDS | _JSON_FIELDS.keys()
    sampling = {name: value for name, value in options.items() if name not in elsewhere}
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = [sampling["stop"]]
    if "structured_output" in sampling:
        sampling["structured_output"] = _structured(sampling["structured_output"])
    known = pb.SamplingParams.DESCRIPTOR.fields_by_name
    if unknown := sampling.keys() - set(known):
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}; see octavo.client.Options")
    return {
        "sampling": pb.SamplingParams(**sampling),
        "output": pb.OutputOptions(**{name: options[name] for name in _OUTPUT_FIELDS & options.keys()}),
        "options": pb.RequestOptions(**{name: options[name] for name in _REQUEST_FIELDS & options.keys()}),
        **{name: options[name] for name in _OWN_FIELDS & options.keys()},
        **{
            field: json.dumps(options[name], ensure_ascii=False)
            for name, field in _JSON_FIELDS.items()
            if name in options
        },
    }
