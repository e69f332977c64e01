"""Chat completions as OpenAI writes them: one body, or chunks. Pure: events in, JSON objects out.

Thinking is `reasoning_content`, as DeepSeek and vLLM call it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from router.openai.schema import AnswerForm
from router.openai.shapes import (
    Json,
    metrics_json,
    prompt_logprobs_json,
    stop_reason,
    token_name,
    tool_call_json,
    tool_delta_json,
    usage_json,
)
from router.prepared import Prepared
from router.requests import Answer, ChoiceEnd, Event, TextDelta, TokenInfo, Usage


class ChatFormat:
    """Writes the answer of one chat request."""

    def __init__(self, prepared: Sequence[Prepared], created: int, form: AnswerForm) -> None:
        (self._prepared,) = prepared
        self._form = form
        self._wants_logprobs = self._prepared.params.logprobs is not None
        self._started: set[int] = set()
        self._head: Json = {
            "id": f"chatcmpl-{self._prepared.answer_id}",
            "created": created,
            "model": self._prepared.options.model,
        }

    def chunks(self, position: int, event: Event) -> Iterator[Json]:
        """The chunks that one event makes: the first of a choice names the role, the last its finish."""
        match event:
            case TextDelta():
                yield from self._start(event.index)
                delta = _delta_json(event)
                if delta or event.logprobs or (self._form.token_ids and event.token_ids):
                    yield self._chunk(event.index, delta or {"content": ""}, event)
            case ChoiceEnd():
                yield from self._start(event.index)
                yield self._chunk(event.index, {}, None, event)

    def usage_chunk(self, usage: Usage) -> Json:
        """The one chunk without choices, where it was asked for."""
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage_json(usage)}

    def body(self, answers: Sequence[Answer]) -> Json:
        """The whole answer."""
        (answer,) = answers
        choices = [self._choice(answer.texts[index], end) for index, end in sorted(answer.ends.items())]
        body = {**self._head, "object": "chat.completion", "choices": choices, "usage": usage_json(answer.usage)}
        if self._prepared.params.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs_json(answer.prompt) if answer.prompt else [None]
        if self._form.token_ids:
            body["prompt_token_ids"] = list(self._prepared.prompt_ids)
        return body

    def _start(self, index: int) -> Iterator[Json]:
        if index not in self._started:
            first = not self._started
            self._started.add(index)
            chunk = self._chunk(index, {"role": "assistant", "content": ""})
            if first and self._form.token_ids:
                chunk["prompt_token_ids"] = list(self._prepared.prompt_ids)
            yield chunk

    def _chunk(self, index: int, delta: Json, text: TextDelta | None = None, end: ChoiceEnd | None = None) -> Json:
        choice: Json = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(text.logprobs) if text is not None and text.logprobs else None,
            "finish_reason": None if end is None else end.finish_reason,
        }
        if text is not None and self._form.token_ids:
            choice["token_ids"] = list(text.token_ids)
        if end is not None:
            choice["stop_reason"] = stop_reason(end.stop_string, end.stop_token_id)
            if self._form.metrics:
                choice["metrics"] = metrics_json(end)
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _choice(self, text: TextDelta, end: ChoiceEnd) -> Json:
        choice: Json = {
            "index": end.index,
            "message": _message_json(text),
            "logprobs": self._logprobs(text.logprobs) if self._wants_logprobs else None,
            "finish_reason": end.finish_reason,
            "stop_reason": stop_reason(end.stop_string, end.stop_token_id),
        }
        if self._form.token_ids:
            choice["token_ids"] = list(text.token_ids)
        if self._form.metrics:
            choice["metrics"] = metrics_json(end)
        return choice

    def _logprobs(self, infos: Sequence[TokenInfo]) -> Json | None:
        if not self._wants_logprobs:
            return None
        content = [{**self._bare(info), "top_logprobs": list(map(self._bare, info.top))} for info in infos]
        return {"content": content, "refusal": None}

    def _bare(self, info: TokenInfo) -> Json:
        name = token_name(info, as_id=True) if self._form.tokens_as_ids else info.text
        return {"token": name, "logprob": info.logprob, "bytes": list(info.raw)}


def _delta_json(delta: TextDelta) -> Json:
    found: Json = {}
    if delta.reasoning:
        found["reasoning_content"] = delta.reasoning
    if delta.text:
        found["content"] = delta.text
    if delta.tool_calls:
        found["tool_calls"] = list(map(tool_delta_json, delta.tool_calls))
    return found


def _message_json(text: TextDelta) -> Json:
    message: Json = {"role": "assistant", "content": text.text, "refusal": None}
    if text.reasoning:
        message["reasoning_content"] = text.reasoning
    if text.tool_calls:
        message["content"] = text.text or None
        message["tool_calls"] = list(map(tool_call_json, text.tool_calls))
    return message
