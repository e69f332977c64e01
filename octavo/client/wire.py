"""octavo.v1's answers as the client's types, for both the blocking and the asyncio client; `asking` makes requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from octavo.client.types import (
    Choice,
    Delta,
    Model,
    QueuePosition,
    Receipt,
    Result,
    TokenLogprob,
    Tokens,
    ToolCall,
    Usage,
)
from octavo.keepalive import keepalive_options
from octavo.tool_calls import join_calls
from octavo.v1 import inference_pb2 as pb

Event: TypeAlias = Delta | QueuePosition

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    *keepalive_options(interval_s=30, timeout_s=20),
]

_FINISH = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


class ResultBuilder:
    """Joins the events of a stream into the result that the unary call would have given."""

    def __init__(self) -> None:
        self._request_id = self._model = ""
        self._deltas: dict[int, list[Delta]] = {}
        self._finished: dict[int, pb.ChoiceFinished] = {}
        self._prompt: list[TokenLogprob] = []
        self._usage: Usage | None = None

    def add(self, response: pb.GenerateResponse | pb.ChatResponse) -> Event | None:
        """Take one response; what is worth showing at once is returned."""
        self._request_id, self._model = response.request_id, response.model
        match response.WhichOneof("event"):
            case "delta":
                delta = read_delta(response.delta)
                self._deltas.setdefault(delta.index, []).append(delta)
                return delta
            case "queued":
                queued = response.queued
                return QueuePosition(queued.position, queued.eta_seconds if queued.HasField("eta_seconds") else None)
            case "finished":
                self._finished[response.finished.index] = response.finished
            case "prompt_logprobs":
                self._prompt.extend(_tokens(response.prompt_logprobs.tokens))
            case "usage":
                self._usage = _usage(response.usage)
        return None

    @property
    def is_complete(self) -> bool:
        return self._usage is not None

    def build(self) -> Result:
        """The result. Raises ValueError before the stream has ended."""
        if self._usage is None:
            raise ValueError("the stream has not ended yet")
        choices = tuple(
            _choice(_join(index, self._deltas.get(index, ())), finished)
            for index, finished in sorted(self._finished.items())
        )
        return Result(self._request_id, self._model, choices, self._usage, tuple(self._prompt))


def read_result(response: pb.GenerateUnaryResponse | pb.ChatUnaryResponse) -> Result:
    """The result of a unary call."""
    choices = tuple(_choice(read_delta(choice.content), choice.finished) for choice in response.choices)
    prompt = tuple(_tokens(response.prompt_logprobs.tokens))
    return Result(response.request_id, response.model, choices, _usage(response.usage), prompt)


def read_models(response: pb.ListModelsResponse) -> list[Model]:
    return [
        Model(model.name, model.max_model_len, model.vocab_size, model.ready, dict(model.weights))
        for model in response.models
    ]


def read_tokens(response: pb.TokenizeResponse) -> Tokens:
    return Tokens(tuple(response.token_ids), tuple(response.texts), response.max_model_len)


def read_delta(delta: pb.Delta) -> Delta:
    return Delta(
        delta.text,
        delta.index,
        delta.start_index,
        tuple(delta.token_ids),
        tuple(_tokens(delta.logprobs)),
        delta.reasoning,
        tuple(ToolCall(call.index, call.id, call.name, call.arguments_json) for call in delta.tool_calls),
    )


def _join(index: int, deltas: Iterable[Delta]) -> Delta:
    parts = tuple(deltas)
    return Delta(
        "".join(part.text for part in parts),
        index,
        0,
        tuple(token_id for part in parts for token_id in part.token_ids),
        tuple(token for part in parts for token in part.logprobs),
        "".join(part.reasoning for part in parts),
        join_calls(call for part in parts for call in part.tool_calls),
    )


def _choice(content: Delta, finished: pb.ChoiceFinished) -> Choice:
    receipt = finished.receipt
    stop = finished.WhichOneof("stop_reason")
    return Choice(
        text=content.text,
        index=content.index,
        token_ids=content.token_ids,
        logprobs=content.logprobs,
        finish_reason=_FINISH[finished.finish_reason],  # type: ignore[arg-type]
        stop_string=finished.stop_string if stop == "stop_string" else None,
        stop_token_id=finished.stop_token_id if stop == "stop_token_id" else None,
        receipt=Receipt(
            queue_seconds=receipt.queue_seconds,
            cached_tokens=receipt.cached_tokens,
            recomputed_tokens=receipt.recomputed_tokens,
            preemptions=receipt.preemptions,
            attempts=receipt.attempts,
            replica=receipt.replica,
            numerics=receipt.numerics,
            batch_invariant=receipt.batch_invariant,
            seed=receipt.seed,
        ),
        reasoning=content.reasoning,
        tool_calls=content.tool_calls,
    )


def _usage(usage: pb.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)


def _tokens(entries: Iterable[pb.TokenLogprob]) -> Iterable[TokenLogprob]:
    for entry in entries:
        yield TokenLogprob(entry.token_id, entry.text, entry.raw, entry.logprob, tuple(_tokens(entry.top)))
