"""Text completions as OpenAI writes them: one body, or chunks. Pure: events in, JSON objects out.

Choice numbers run over prompts and their n answers: choice i of prompt p is p·n + i.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import add

from router.echo import prompt_text
from router.openai.schema import AnswerForm
from router.openai.shapes import (
    Json,
    echoed_tokens,
    metrics_json,
    prompt_logprobs_json,
    stop_reason,
    token_name,
    usage_json,
)
from router.prepared import Prepared
from router.requests import Answer, ChoiceEnd, Event, PromptInfo, TextDelta, TokenInfo, Usage


class CompletionFormat:
    """Writes the answer of one completions request, which may hold several prompts."""

    def __init__(self, prepared: Sequence[Prepared], created: int, form: AnswerForm) -> None:
        self._prepared = prepared
        self._tokenizer = prepared[0].text.tokenizer
        self._params = prepared[0].params
        self._form = form
        self._prompt_infos: dict[int, list[PromptInfo]] = {}
        self._text_lengths: dict[int, int] = {}
        self._head: Json = {
            "id": f"cmpl-{prepared[0].answer_id}",
            "object": "text_completion",
            "created": created,
            "model": prepared[0].options.model,
        }

    def chunks(self, position: int, event: Event) -> Iterator[Json]:
        """The chunks that one event makes; the first of a choice holds the prompt, where it is echoed."""
        match event:
            case PromptInfo():
                self._prompt_infos.setdefault(position, []).append(event)
            case TextDelta():
                number = self._number(position, event.index)
                # Clients take the first chunk for the first token, also where that adds no text yet.
                is_first = number not in self._text_lengths
                yield from self._start(position, event.index)
                if is_first or event.text or event.logprobs or (self._form.token_ids and event.token_ids):
                    chunk = self._chunk(number, event.text, event.logprobs)
                    if self._form.token_ids:
                        chunk["choices"][0]["token_ids"] = list(event.token_ids)
                    yield chunk
            case ChoiceEnd():
                yield from self._start(position, event.index)
                yield self._chunk(self._number(position, event.index), "", (), event)

    def usage_chunk(self, usage: Usage) -> Json:
        """The one chunk without choices, where it was asked for."""
        return {**self._head, "choices": [], "usage": usage_json(usage)}

    def body(self, answers: Sequence[Answer]) -> Json:
        """The whole answer."""
        choices = [
            self._choice(position, answer, end)
            for position, answer in enumerate(answers)
            for _, end in sorted(answer.ends.items())
        ]
        usage = reduce(add, (answer.usage for answer in answers))
        return {**self._head, "choices": choices, "usage": usage_json(usage)}

    def _number(self, position: int, index: int) -> int:
        return position * self._params.n + index

    def _start(self, position: int, index: int) -> Iterator[Json]:
        number = self._number(position, index)
        if number in self._text_lengths:
            return
        self._text_lengths[number] = 0
        if not self._params.echo and not self._form.token_ids:
            return
        found = self._prompt_infos.get(position)
        infos = self._echoed(position, _join(found) if found else None)
        chunk = self._chunk(number, self._prompt_text(position) if self._params.echo else "", infos)
        if self._form.token_ids:
            chunk["choices"][0] |= {"prompt_token_ids": list(self._prepared[position].prompt_ids), "token_ids": []}
        yield chunk

    def _chunk(self, number: int, text: str, infos: Sequence[TokenInfo], end: ChoiceEnd | None = None) -> Json:
        choice: Json = {
            "index": number,
            "text": text,
            "logprobs": self._logprobs(infos, self._text_lengths[number]) if infos else None,
            "finish_reason": None if end is None else end.finish_reason,
        }
        if end is not None:
            choice["stop_reason"] = stop_reason(end.stop_string, end.stop_token_id)
            if self._form.metrics:
                choice["metrics"] = metrics_json(end)
        self._text_lengths[number] += sum(len(info.text) for info in infos)
        return {**self._head, "choices": [choice]}

    def _choice(self, position: int, answer: Answer, end: ChoiceEnd) -> Json:
        delta = answer.texts[end.index]
        echoed = self._echoed(position, answer.prompt) if self._params.echo else ()
        infos = (*echoed, *delta.logprobs)
        choice: Json = {
            "index": self._number(position, end.index),
            "text": (self._prompt_text(position) if self._params.echo else "") + delta.text,
            "logprobs": self._logprobs(infos, 0) if self._params.logprobs is not None else None,
            "finish_reason": end.finish_reason,
            "stop_reason": stop_reason(end.stop_string, end.stop_token_id),
        }
        if self._form.metrics:
            choice["metrics"] = metrics_json(end)
        if self._form.token_ids:
            choice |= {
                "prompt_token_ids": list(self._prepared[position].prompt_ids),
                "token_ids": list(delta.token_ids),
            }
        if self._params.prompt_logprobs is not None and not self._form.echo_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs_json(answer.prompt) if answer.prompt else [None]
        return choice

    def _logprobs(self, infos: Sequence[TokenInfo], offset: int) -> Json:
        def name(info: TokenInfo) -> str:
            return token_name(info, as_id=self._form.tokens_as_ids)

        offsets = []
        for info in infos:
            offsets.append(offset)
            offset += len(info.text)
        return {
            "tokens": list(map(name, infos)),
            "token_logprobs": [info.logprob for info in infos],
            "top_logprobs": [
                None if info.logprob is None else {name(other): other.logprob for other in (*info.top, info)}
                for info in infos
            ],
            "text_offset": offsets,
        }

    def _prompt_text(self, position: int) -> str:
        return prompt_text(self._prepared[position])

    def _echoed(self, position: int, found: PromptInfo | None) -> tuple[TokenInfo, ...]:
        if not self._form.echo_logprobs:
            return ()
        ids = self._prepared[position].prompt_ids
        return echoed_tokens(ids, [self._tokenizer.token_bytes(token_id) for token_id in ids], found)


def _join(parts: Sequence[PromptInfo]) -> PromptInfo:
    return PromptInfo(parts[0].start_index, tuple(info for part in parts for info in part.tokens))
