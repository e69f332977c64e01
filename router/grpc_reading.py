"""octavo.v1's requests, read into the shapes of `router.requests`; nothing else reads these messages.

A field that a client left unset stays unset, so that the rules of `router.sampling` see what was said. Errors name
fields as the HTTP surface does, where both have them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

from octavo.v1 import inference_pb2 as pb
from router.errors import InvalidRequest
from router.requests import ChatPrompt, CompletionPrompt, GenerationRequest, RequestOptions
from router.sampling import SamplingRequest
from router.structured.message import read_structured_output
from router.text.prompt import ChatOptions

Request: TypeAlias = pb.GenerateRequest | pb.ChatRequest

_PLAIN_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "n",
    "best_of",
)
_TOOL_MODES = {
    pb.TOOL_CHOICE_MODE_UNSPECIFIED: "auto",
    pb.TOOL_CHOICE_MODE_AUTO: "auto",
    pb.TOOL_CHOICE_MODE_NONE: "none",
    pb.TOOL_CHOICE_MODE_REQUIRED: "required",
}


def read_generate(request: pb.GenerateRequest, deadline_s: float | None, request_id: str) -> GenerationRequest:
    """A Generate request, called `request_id`. Raises InvalidRequest for what is not supported."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("prompt", "prompt: one of text and token_ids must be set")
    value: object = request.text if kind == "text" else list(request.token_ids.ids)
    adds = request.add_special_tokens if request.HasField("add_special_tokens") else True
    return _request(request, CompletionPrompt(value, adds), deadline_s, request_id)


def read_chat(request: pb.ChatRequest, deadline_s: float | None, request_id: str) -> GenerationRequest:
    """A Chat request, called `request_id`. Raises InvalidRequest for what is not supported."""
    return _request(request, read_conversation(request), deadline_s, request_id)


def read_conversation(request: pb.ChatRequest) -> ChatPrompt:
    """All that shapes the prompt of a Chat request, and how its answers are read."""
    variables = _json("template_variables_json", request.template_variables_json)
    if variables is not None and not isinstance(variables, dict):
        raise InvalidRequest("template_variables_json", "template_variables_json must be a JSON object")
    options = ChatOptions(
        tools=[_tool(f"tools[{index}]", tool) for index, tool in enumerate(request.tools)] or None,
        documents=_json("documents_json", request.documents_json),
        template_kwargs=variables,
        add_generation_prompt=request.add_generation_prompt if request.HasField("add_generation_prompt") else None,
        continue_final_message=request.continue_final_message,
    )
    return ChatPrompt(
        [_message(message) for message in request.messages],
        options,
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls if request.HasField("parallel_tool_calls") else None,
        include_reasoning=not request.output.hide_reasoning,
        add_special_tokens=request.add_special_tokens,
    )


def read_tokenize(request: pb.TokenizeRequest) -> CompletionPrompt | ChatPrompt:
    """The prompt of a Tokenize request. Raises InvalidRequest."""
    match request.WhichOneof("prompt"):
        case "text":
            adds = request.add_special_tokens if request.HasField("add_special_tokens") else True
            return CompletionPrompt(request.text, adds)
        case "chat":
            return read_conversation(request.chat)
    raise InvalidRequest("prompt", "prompt: one of text and chat must be set")


def _request(
    request: Request, prompt: CompletionPrompt | ChatPrompt, deadline_s: float | None, request_id: str
) -> GenerationRequest:
    if request.resume:
        raise InvalidRequest("resume", "resume: this server does not continue answers of other routers; leave it empty")
    cut = request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None
    return GenerationRequest(
        prompt,
        _sampling(request),
        _options(request, deadline_s, request_id),
        truncate_prompt_tokens=cut,
        grammar=read_structured_output(request.sampling),
    )


def _message(message: pb.ChatMessage) -> Mapping[str, Any]:
    found: dict[str, Any] = {"role": message.role}
    if message.HasField("content"):
        found["content"] = message.content
    if message.name:
        found["name"] = message.name
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
            for call in message.tool_calls
        ]
    return found


def _tool(path: str, tool: pb.Tool) -> Mapping[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    parameters = _json(f"{path}.parameters_json", tool.parameters_json)
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def _tool_choice(choice: pb.ToolChoice) -> object:
    match choice.WhichOneof("choice"):
        case "name":
            return {"type": "function", "function": {"name": choice.name}}
        case "mode":
            return _TOOL_MODES.get(choice.mode, f"mode {choice.mode}")
    return None


def _json(field: str, text: str) -> Any:
    """The value that a field holds as JSON; None where it is empty."""
    if not text:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "is nested too deeply" if isinstance(error, RecursionError) else f"is not JSON: {error}"
        raise InvalidRequest(field, f"{field} {reason}") from None


def _sampling(request: Request) -> SamplingRequest:
    asked, output = request.sampling, request.output
    said: dict[str, Any] = {name: getattr(asked, name) for name in _PLAIN_FIELDS if asked.HasField(name)}  # type: ignore[arg-type]
    return SamplingRequest(
        **said,
        logit_bias=dict(asked.logit_bias) or None,
        stop=list(asked.stop) or None,
        stop_token_ids=list(asked.stop_token_ids) or None,
        ignore_eos=asked.ignore_eos,
        logprobs=output.logprobs if output.HasField("logprobs") else None,
        prompt_logprobs=output.prompt_logprobs if output.HasField("prompt_logprobs") else None,
        echo=output.echo,
        skip_special_tokens=not output.include_special_tokens,
        include_stop_str_in_output=output.include_stop_string,
    )


def _options(request: Request, deadline_s: float | None, request_id: str) -> RequestOptions:
    options = request.options
    return RequestOptions(
        model=request.model,
        request_id=request_id,
        priority=options.priority,
        cache_salt=options.cache_salt,
        adapter=options.adapter,
        user=options.user,
        queue_events=options.queue_events,
        deadline_s=deadline_s,
    )
