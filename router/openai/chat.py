"""Chat completions as OpenAI writes them: one body, or chunks. Pure: events in, JSON objects out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from router.openai.shapes import Json, prompt_logprobs_json, stop_reason, usage_json
from router.prepared import Prepared
from router.requests import Answer, ChoiceEnd, Event, TextDelta, TokenInfo, Usage
from router.streams.types import ReceiptParts


class ChatFormat:
    """Writes the answer of one chat request."""

    def __init__(self, prepared: Sequence[Prepared], created: int) -> None:
        (self._prepared,) = prepared
        self._wants_logprobs = self._prepared.params.logprobs is not None
        self._started: set[int] = set()
        self._head: Json = {
            "id": f"chatcmpl-{self._prepared.internal_id}",
            "created": created,
            "model": self._prepared.options.model,
        }

    def chunks(self, position: int, event: Event) -> Iterator[Json]:
        """The chunks that one event makes: the first of a choice names the role, the last its finish."""
        match event:
            case TextDelta():
                yield from self._start(event.index)
                if event.text or event.logprobs:
                    yield self._chunk(event.index, {"content": event.text}, event.logprobs)
            case ChoiceEnd():
                yield from self._start(event.index)
                yield self._chunk(event.index, {}, (), event)

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
        return body

    def _start(self, index: int) -> Iterator[Json]:
        if index not in self._started:
            self._started.add(index)
            yield self._chunk(index, {"role": "assistant", "content": ""}, ())

    def _chunk(self, index: int, delta: Json, infos: Sequence[TokenInfo], end: ChoiceEnd | None = None) -> Json:
        choice: Json = {
            "index": index,
            "delta": delta,
            "logprobs": {"content": list(map(_token_json, infos))} if self._wants_logprobs and infos else None,
            "finish_reason": None if end is None else end.finish_reason,
        }
        if end is not None:
            choice["stop_reason"] = stop_reason(end.stop_string, end.stop_token_id)
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _choice(self, text: TextDelta, end: ChoiceEnd) -> Json:
        return {
            "index": end.index,
            "message": {"role": "assistant", "content": text.text},
            "logprobs": {"content": list(map(_token_json, text.logprobs))} if self._wants_logprobs else None,
            "finish_reason": end.finish_reason,
            "stop_reason": stop_reason(end.stop_string, end.stop_token_id),
            "receipt": receipt_json(end.receipt, end.seed),
        }


def _token_json(info: TokenInfo) -> Json:
    return {**_bare(info), "top_logprobs": [_bare(other) for other in info.top]}


def _bare(info: TokenInfo) -> Json:
    return {"token": info.text, "logprob": info.logprob, "bytes": list(info.raw)}


def receipt_json(receipt: ReceiptParts, seed: int) -> Json:
    """How a choice was served; an addition to OpenAI's form."""
    return {
        "queue_seconds": receipt.queue_s,
        "cached_tokens": receipt.cached_tokens or 0,
        "recomputed_tokens": receipt.recomputed_tokens,
        "preemptions": receipt.num_preemptions,
        "attempts": receipt.num_attempts,
        "replica": receipt.replica,
        "numerics": receipt.numerics,
        "batch_invariant": receipt.batch_invariant,
        "seed": seed,
    }
