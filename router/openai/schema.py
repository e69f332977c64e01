"""OpenAI request bodies, read into `GenerationRequest`.

Takes what `json.loads` gave and trusts no type: values go on as they are to the checks that both surfaces share. Which
fields exist, and what happens to the others, is in `fields`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.errors import InvalidRequest, check_text, show_value
from router.openai.fields import CHAT_FIELDS, COMPLETION_FIELDS, SAMPLING_FIELDS, given_fields
from router.requests import ChatPrompt, CompletionPrompt, GenerationRequest, RequestOptions
from router.sampling import SamplingRequest, chat_logprobs
from router.sampling_rules import check_flag
from router.structured.fields import read_grammar
from router.text.prompt import ChatOptions


@dataclass(frozen=True)
class AnswerForm:
    """What the HTTP answer shows beside the text."""

    stream: bool = False
    include_usage: bool = False
    """A last chunk with usage."""
    continuous_usage: bool = False
    """Usage so far in every chunk."""
    token_ids: bool = False
    """The ids of prompt and output."""
    tokens_as_ids: bool = False
    """Logprobs name tokens `token_id:N`, since a token's text may be another's too."""
    metrics: bool = False
    """How each choice was served."""
    echo_logprobs: bool = False
    """Prompt logprobs were asked for by `echo`, so they are part of the choices' own."""


@dataclass(frozen=True)
class HttpRequest:
    """A request with what concerns its HTTP answer alone."""

    request: GenerationRequest
    form: AnswerForm
    ignored_fields: tuple[str, ...] = ()


def read_completion(body: Mapping[str, Any], request_id: str) -> HttpRequest:
    """A body of /v1/completions. Raises InvalidRequest naming the field."""
    given, ignored = given_fields(body, COMPLETION_FIELDS)
    if "prompt" not in given:
        raise InvalidRequest("prompt", "prompt is missing")
    logprobs, echo = given.get("logprobs"), given.get("echo")
    # OpenAI's completions report a prompt's logprobs by echoing it.
    echo_logprobs = echo is True and logprobs is not None and given.get("prompt_logprobs") is None
    more = {"prompt_logprobs": logprobs} if echo_logprobs else {}
    prompt = CompletionPrompt(given["prompt"], _flag(given, "add_special_tokens", default=True))
    request = GenerationRequest(
        prompt,
        _sampling(given, logprobs=logprobs, **more),
        _options(given, request_id),
        truncate_prompt_tokens=given.get("truncate_prompt_tokens"),
        grammar=read_grammar(given),
    )
    return HttpRequest(request, _form(given, echo_logprobs=echo_logprobs), ignored)


def read_chat(body: Mapping[str, Any], request_id: str) -> HttpRequest:
    """A body of /v1/chat/completions. Raises InvalidRequest naming the field."""
    given, ignored = given_fields(body, CHAT_FIELDS)
    if "messages" not in given:
        raise InvalidRequest("messages", "messages is missing")
    if given.get("modalities", ["text"]) != ["text"]:
        raise InvalidRequest("modalities", "modalities must be ['text'] or left out: this server makes text only")
    if given.get("max_completion_tokens") is not None:
        given["max_tokens"] = given["max_completion_tokens"]
    logprobs = chat_logprobs(given.get("logprobs"), given.get("top_logprobs"))
    request = GenerationRequest(
        chat_prompt(given),
        _sampling(given, logprobs=logprobs),
        _options(given, request_id),
        truncate_prompt_tokens=given.get("truncate_prompt_tokens"),
        grammar=read_grammar(given),
    )
    return HttpRequest(request, _form(given), ignored)


def chat_prompt(given: Mapping[str, Any]) -> ChatPrompt:
    """The conversation of a body that has `messages`, with all that decides how it is rendered."""
    opens = given.get("add_generation_prompt")
    settings = {name: check_text(name, given[name]) for name in ("reasoning_effort", "verbosity") if name in given}
    options = ChatOptions(
        tools=given.get("tools"),
        documents=given.get("documents"),
        template_kwargs=given.get("chat_template_kwargs"),
        settings=settings,
        add_generation_prompt=None if opens is None else check_flag("add_generation_prompt", opens, default=True),
        continue_final_message=_flag(given, "continue_final_message"),
    )
    return ChatPrompt(
        given["messages"],
        options,
        tool_choice=given.get("tool_choice"),
        parallel_tool_calls=given.get("parallel_tool_calls"),
        include_reasoning=given.get("include_reasoning"),
        add_special_tokens=_flag(given, "add_special_tokens"),
    )


def _form(given: Mapping[str, Any], *, echo_logprobs: bool = False) -> AnswerForm:
    stream = _flag(given, "stream")
    options = given.get("stream_options")
    if options is None:
        options = {}
    elif not stream:
        raise InvalidRequest("stream_options", "stream_options is allowed only when stream is true")
    elif not isinstance(options, Mapping):
        raise InvalidRequest("stream_options", f"stream_options must be an object, got {show_value(options)}")
    if stream and given.get("prompt_logprobs") is not None:
        raise InvalidRequest("prompt_logprobs", "prompt_logprobs is not available when stream is true")
    best_of, n = given.get("best_of"), given.get("n", 1)
    if stream and isinstance(best_of, int) and isinstance(n, int) and best_of > n:
        raise InvalidRequest(
            "best_of", f"best_of {best_of} must equal n when stream is true: which is best is known at the end only"
        )
    # It tells decoders apart that put blanks around special tokens; this one puts none, whatever is asked.
    _flag(given, "spaces_between_special_tokens")
    return AnswerForm(
        stream,
        include_usage=_flag(options, "include_usage", "stream_options."),
        continuous_usage=_flag(options, "continuous_usage_stats", "stream_options."),
        token_ids=_flag(given, "return_token_ids"),
        tokens_as_ids=_flag(given, "return_tokens_as_token_ids"),
        metrics=_flag(given, "return_metrics"),
        echo_logprobs=echo_logprobs,
    )


def _flag(given: Mapping[str, Any], name: str, prefix: str = "", *, default: bool = False) -> bool:
    return check_flag(f"{prefix}{name}", given.get(name), default=default)


def _sampling(given: Mapping[str, Any], **more: Any) -> SamplingRequest:
    said = {name: given[name] for name in SAMPLING_FIELDS if name in given}
    return SamplingRequest(**{**said, **more})


def _options(given: Mapping[str, Any], request_id: str) -> RequestOptions:
    texts = {
        name: check_text(name, given.get(name, "")) for name in ("model", "cache_salt", "adapter", "user", "request_id")
    }
    return RequestOptions(
        model=texts["model"],
        request_id=request_id,
        priority=given.get("priority", 0),
        cache_salt=texts["cache_salt"],
        adapter=texts["adapter"],
        user=texts["user"],
    )
