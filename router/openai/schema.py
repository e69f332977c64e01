"""OpenAI request bodies, read into `GenerationRequest`.

Takes what `json.loads` gave and trusts no type: values go on as they are to the checks that both surfaces share. Knows
which fields exist, which are refused because they would change the answer, and which have no effect.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.errors import InvalidRequest, check_text, show_value
from router.requests import ChatPrompt, CompletionPrompt, GenerationRequest, RequestOptions
from router.sampling import SamplingRequest, chat_logprobs
from router.sampling_rules import check_flag
from router.text.prompt import ChatOptions

_LOG = logging.getLogger(__name__)

_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "n",
    "prompt_logprobs",
    "echo",
    "skip_special_tokens",
    "include_stop_str_in_output",
)
_COMMON_FIELDS = frozenset(
    (*_SAMPLING_FIELDS, "model", "stream", "stream_options", "priority", "cache_salt", "request_id", "adapter", "user")
)
_COMPLETION_FIELDS = _COMMON_FIELDS | {"prompt", "logprobs", "best_of", "add_special_tokens"}
_CHAT_FIELDS = _COMMON_FIELDS | {
    "messages",
    "logprobs",
    "top_logprobs",
    "max_completion_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "documents",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "modalities",
    "tools",
}

_REFUSED = {
    "suffix": "this server completes a prompt at its end only; leave it out",
    "functions": "this server does not call functions yet; leave it out",
    "function_call": "this server does not call functions yet; leave it out",
    "audio": "this server makes text only; leave it out",
    "prediction": "predicted output is not supported; leave it out",
    "use_beam_search": "beam search is not supported; leave it out",
    "prompt_embeds": "prompts are text or token ids; leave it out",
    "chat_template": "templates come from the model's files, not from requests; leave it out",
    "structured_outputs": "output cannot be constrained yet; leave it out",
    "guided_json": "output cannot be constrained yet; leave it out",
    "guided_regex": "output cannot be constrained yet; leave it out",
    "guided_choice": "output cannot be constrained yet; leave it out",
    "guided_grammar": "output cannot be constrained yet; leave it out",
    "logits_processors": "code from requests is not run; leave it out",
    "bad_words": "not supported; use logit_bias for single tokens",
    "allowed_token_ids": "not supported; use logit_bias",
    "truncate_prompt_tokens": "prompts are never cut; shorten it before sending",
    "kv_transfer_params": "not supported; leave it out",
}


@dataclass(frozen=True)
class HttpRequest:
    """A request with what concerns its HTTP answer alone."""

    request: GenerationRequest
    stream: bool
    include_usage: bool
    echo_logprobs: bool = False
    """Prompt logprobs were asked for by `echo`, so they are part of the choices' own."""


def read_completion(body: Mapping[str, Any], request_id: str) -> HttpRequest:
    """A body of /v1/completions. Raises InvalidRequest naming the field."""
    given = _given(body, _COMPLETION_FIELDS)
    if "prompt" not in given:
        raise InvalidRequest("prompt", "prompt is missing")
    best_of = given.get("best_of")
    if best_of is not None and best_of != given.get("n", 1):
        raise InvalidRequest(
            "best_of", f"best_of must equal n or be left out, got {show_value(best_of)}: choices are not ranked"
        )
    stream, include_usage = _stream(given)
    logprobs, echo = given.get("logprobs"), given.get("echo")
    # OpenAI's completions report a prompt's logprobs by echoing it.
    echo_logprobs = echo is True and logprobs is not None and given.get("prompt_logprobs") is None
    more = {"prompt_logprobs": logprobs} if echo_logprobs else {}
    prompt = CompletionPrompt(
        given["prompt"],
        check_flag("add_special_tokens", given.get("add_special_tokens"), default=True),
    )
    request = GenerationRequest(prompt, _sampling(given, logprobs=logprobs, **more), _options(given, request_id))
    return HttpRequest(request, stream, include_usage, echo_logprobs)


def read_chat(body: Mapping[str, Any], request_id: str) -> HttpRequest:
    """A body of /v1/chat/completions. Raises InvalidRequest naming the field."""
    given = _given(body, _CHAT_FIELDS)
    if "messages" not in given:
        raise InvalidRequest("messages", "messages is missing")
    _refuse_unsupported_chat(given)
    stream, include_usage = _stream(given)
    opens = given.get("add_generation_prompt")
    options = ChatOptions(
        documents=given.get("documents"),
        template_kwargs=given.get("chat_template_kwargs"),
        add_generation_prompt=None if opens is None else check_flag("add_generation_prompt", opens, default=True),
        continue_final_message=check_flag("continue_final_message", given.get("continue_final_message"), default=False),
    )
    if given.get("max_completion_tokens") is not None:
        given["max_tokens"] = given["max_completion_tokens"]
    logprobs = chat_logprobs(given.get("logprobs"), given.get("top_logprobs"))
    request = GenerationRequest(
        ChatPrompt(given["messages"], options), _sampling(given, logprobs=logprobs), _options(given, request_id)
    )
    return HttpRequest(request, stream, include_usage)


def _given(body: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """The fields that say something: null is the same as absent. Unknown ones have no effect, as in OpenAI's SDKs."""
    given = {name: value for name, value in body.items() if value is not None}
    for name, remedy in _REFUSED.items():
        if name in given and given[name] not in (False, [], {}, ""):
            raise InvalidRequest(name, f"{name} is not supported: {remedy}")
    unknown = given.keys() - known - _REFUSED.keys()
    if unknown:
        _LOG.debug("ignored %d unknown fields of a request", len(unknown))
    return given


def _stream(given: Mapping[str, Any]) -> tuple[bool, bool]:
    """(stream, whether a last chunk with usage is wanted)."""
    stream = check_flag("stream", given.get("stream"), default=False)
    options = given.get("stream_options")
    if options is None:
        include_usage = False
    elif not stream:
        raise InvalidRequest("stream_options", "stream_options is allowed only when stream is true")
    elif not isinstance(options, Mapping):
        raise InvalidRequest("stream_options", f"stream_options must be an object, got {show_value(options)}")
    else:
        include_usage = check_flag("stream_options.include_usage", options.get("include_usage"), default=False)
    if stream and given.get("prompt_logprobs") is not None:
        raise InvalidRequest("prompt_logprobs", "prompt_logprobs is not available when stream is true")
    return stream, include_usage


def _sampling(given: Mapping[str, Any], **more: Any) -> SamplingRequest:
    said = {name: given[name] for name in _SAMPLING_FIELDS if name in given}
    return SamplingRequest(**{**said, **more})


def _options(given: Mapping[str, Any], request_id: str) -> RequestOptions:
    texts = {name: check_text(name, given.get(name, "")) for name in ("model", "cache_salt", "adapter", "request_id")}
    return RequestOptions(
        model=texts["model"],
        request_id=request_id or texts["request_id"],
        priority=given.get("priority", 0),
        cache_salt=texts["cache_salt"],
        adapter=texts["adapter"],
    )


def _refuse_unsupported_chat(given: Mapping[str, Any]) -> None:
    if given.get("tools"):
        raise InvalidRequest("tools", "tools is not supported: this server does not call tools yet; leave it out")
    if given.get("tool_choice", "none") not in ("none", "auto"):
        raise InvalidRequest("tool_choice", "tool_choice is not supported without tools; leave it out")
    shape = given.get("response_format")
    if shape is not None and not (isinstance(shape, Mapping) and shape.get("type") == "text"):
        raise InvalidRequest(
            "response_format", "response_format is not supported other than {'type': 'text'}: output is not constrained"
        )
    if given.get("modalities", ["text"]) != ["text"]:
        raise InvalidRequest("modalities", "modalities must be ['text'] or left out: this server makes text only")
